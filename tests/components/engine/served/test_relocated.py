"""Servers that others keep: one that is started again elsewhere is found by its rendezvous file."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

from creditgraph.components.engine.served.addresses import read_rendezvous, write_rendezvous


def test_a_server_that_its_keeper_starts_elsewhere_comes_back(fleet, tmp_path):
    keeper = fleet(3)  # stands for those who start servers: steps of a job
    zero, one, spare = (s.address for s in keeper.pool.servers)
    file = tmp_path / "found.json"
    write_rendezvous(file, [zero, one])
    user = fleet(2, addresses=read_rendezvous(file, 1.0), hang_seconds=1.0)
    user.load(1)
    user.generate()

    keeper.kill(1)
    user.generate()  # the other server responds
    again = dataclasses.replace(spare, name=one.name)
    write_rendezvous(file, [zero, again])
    user.until(lambda: user.states() == ["ready"] * 2 and user.pool.servers[1].address.url == spare.url, 60.0)
    assert user.pool.servers[1].label.startswith("1-")
    user.load(2)
    user.generate(version=2)


def test_where_all_are_lost_those_that_a_job_starts_again_are_waited_for(fleet, tmp_path):
    keeper = fleet(2, restarts=0)
    one, spare = (s.address for s in keeper.pool.servers)
    file = tmp_path / "found.json"
    write_rendezvous(file, [one])
    user = fleet(1, addresses=read_rendezvous(file, 1.0), hang_seconds=0.5)
    user.load(1)
    keeper.kill(0)
    with ThreadPoolExecutor(1) as aside:
        done = aside.submit(user.generate)
        time.sleep(3.0)  # longer than hang_seconds and a look at the servers
        assert not done.done()
        write_rendezvous(file, [dataclasses.replace(spare, name=one.name)])
        done.result(60.0)


def test_a_run_that_starts_while_a_server_is_started_again_elsewhere_finds_it(fleet, tmp_path):
    keeper = fleet(2, restarts=0)
    one, spare = (s.address for s in keeper.pool.servers)
    file = tmp_path / "found.json"
    write_rendezvous(file, [one])
    listed = read_rendezvous(file, 1.0)
    keeper.kill(0)
    with ThreadPoolExecutor(1) as aside:
        starting = aside.submit(fleet, 1, addresses=listed)
        time.sleep(1.0)
        assert not starting.done()
        write_rendezvous(file, [dataclasses.replace(spare, name=one.name)])
        user = starting.result(60.0)
    user.load(1)
    user.generate()
