"""Routing, back-pressure and weight updates of a pool of real processes."""

import dataclasses
import threading
import time
from pathlib import Path

import pytest

from creditgraph.components.engine.messages import ScoreRequest, group_of
from creditgraph.components.engine.served.addresses import Address, find_servers, read_rendezvous
from creditgraph.components.engine.served.settings import ServerSettings
from creditgraph.components.engine.vllm.settings import VllmSettings
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, RunError
from creditgraph.pipeline.core.handles import ThoughtLimits


def test_every_row_is_sampled_and_a_group_stays_on_one_server(fleet):
    run = fleet(3, options=["--seconds", "0.02"])
    run.load(1)
    run.generate(prompts=9, group=4)
    served: dict[tuple, set] = {}
    load: dict[int, int] = {}
    for entry in run.records():
        if "prompt" in entry:
            served.setdefault(tuple(entry["prompt"]), set()).add(entry["server"])
            load[entry["server"]] = load.get(entry["server"], 0) + 1
    assert all(len(servers) == 1 for servers in served.values())
    assert sorted(load.values()) == [12, 12, 12]
    counted = run.pool.take_counters()
    assert counted["requests"] == 36
    assert run.pool.num_ready() == 3
    assert "retries" not in counted


def test_rows_that_converse_wait_for_no_other_and_survive_a_server(fleet):
    run = fleet(2, options=["--seconds", "0.02"])
    run.load(1)
    rows, turns, ended = {}, [3, 1, 2, 4], []
    others = threading.Semaphore(0)

    def follow(row):
        turn = rows[row][0] + 1 if row in rows else 0
        if turn:
            assert rows[row][1].completions().tokens.to_lists() == [run.tokens(0, 2 + turn)]
        if row == 0 and turn == 1:
            for _ in range(3):
                others.acquire()  # until the others have ended
        if turn == turns[row]:
            ended.append(row)
            others.release()
            return None
        rows[row] = turn, run.rows(1, 1, max_tokens=3 + turn)
        (request,) = rows[row][1].start()
        return dataclasses.replace(request, row=row, group=row)

    run.fault(1, "die in generation")
    run.pool.converse(4, follow, lambda row, *part: rows[row][1].feed(0, *part), lambda row: rows[row][1].reset(0))
    assert ended[-1] == 0
    assert sorted(ended) == [0, 1, 2, 3]
    counted = run.pool.take_counters()
    assert counted["requests"] == sum(turns) + counted["retries"]
    assert counted["retries"] > 0


def test_more_rows_than_threads_converse(fleet, monkeypatch):
    monkeypatch.setattr("creditgraph.components.engine.served.pool._MAX_THREADS", 1)
    run = fleet(1)
    run.load(1)
    rows = run.rows(3, 1, max_tokens=8)
    waiting = {request.row: request for request in rows.start()}
    run.pool.converse(3, lambda row: waiting.pop(row, None), rows.feed, rows.reset)
    assert not waiting
    assert rows.completions().tokens.to_lists() == [run.tokens(n, 8) for n in range(3)]
    assert run.pool.take_counters()["requests"] == 3


def test_an_error_in_an_answer_ends_the_conversation(fleet):
    run = fleet(1, options=["--seconds", "60"])
    run.load(1)
    rows = run.rows(2, 1)
    first = rows.start()

    def follow(row):
        if row:
            raise CreditgraphError("not this one")
        return first[row]

    start = time.monotonic()
    with pytest.raises(CreditgraphError, match="not this one"):
        run.pool.converse(2, follow, rows.feed, rows.reset)
    assert time.monotonic() - start < 30
    assert run.pool.in_flight() == {"server 0 requests": 0}


def test_scores_go_where_their_prompt_was_sampled(fleet):
    run = fleet(3, options=["--seconds", "0.02"])
    run.load(1)
    run.generate(prompts=9, group=2)
    prompts = [[3, 4 + n] for n in range(9)]
    requests = [
        ScoreRequest(row=n, group=group_of(prompt), context=[*prompt, 9, 9], tokens=[5, 6], temperature=1.0)
        for n, prompt in enumerate(prompts)
    ]
    run.pool.score(requests)
    sampled = {tuple(e["prompt"]): e["server"] for e in run.records() if "prompt" in e}
    scored = {tuple(e["scored"][:2]): e["server"] for e in run.records() if "scored" in e}
    assert scored == sampled
    assert len(set(scored.values())) == 3


def test_one_large_group_spills_to_idle_servers(fleet):
    run = fleet(2, options=["--seconds", "0.1"])
    run.load(1)
    run.generate(prompts=1, group=64)
    by_server = [
        sum(e.get("server") == port for e in run.records() if "prompt" in e)
        for port in {e["server"] for e in run.records()}
    ]
    assert min(by_server) > 10


def test_no_server_gets_more_requests_than_allowed(fleet):
    run = fleet(2, options=["--seconds", "0.05"], max_in_flight=3)
    run.load(1)
    most = []
    thread = threading.Thread(target=run.generate, kwargs={"prompts": 8, "group": 4})
    thread.start()
    while thread.is_alive():
        most.append(max(s.outstanding for s in run.pool.servers))
        time.sleep(0.002)
    thread.join()
    assert max(most) == 3
    assert len([e for e in run.records() if "prompt" in e]) == 32


def test_a_streamed_row_is_one_request_that_ends_with_the_row(fleet):
    run = fleet(2)
    run.load(1)
    rows = run.rows(2, 3, max_tokens=9000, thoughts=ThoughtLimits(stop="\x01\x01", final="", max_tokens=1))
    for n in range(2):
        run.fault(
            n, "", part_seconds=0.01
        )  # of 3000 parts: the end of the row gets to the server long before that of its request
    done = run.run(rows)
    assert done.finish_reason == ["thoughts"] * 6
    assert done.thought_ends.to_lists() == [list(range(1, 51))] * 6
    assert done.tokens.to_lists() == [run.tokens(row, 50) for row in range(6)]
    assert run.pool.take_counters()["requests"] == 6
    finished = [e for e in run.records() if "reason" in e]
    assert [e["reason"] for e in finished] == ["abort"] * 6
    assert max(e["sent"] for e in finished) < 9000


def test_a_streamed_row_that_the_server_does_not_abort_is_read_to_the_end_and_not_requested_again(fleet):
    run = fleet(1)
    run.load(1)
    rows = run.rows(2, 3, max_tokens=60, thoughts=ThoughtLimits(stop="\x01\x01", final="", max_tokens=1))
    run.fault(0, "no aborts")
    done = run.run(rows)
    assert done.finish_reason == ["thoughts"] * 6
    assert done.tokens.to_lists() == [run.tokens(row, 50) for row in range(6)]
    counted = run.pool.take_counters()
    assert (counted["requests"], counted.get("retries", 0)) == (6, 0)
    assert [e["reason"] for e in run.records() if "reason" in e] == ["length"] * 6


def test_a_streamed_row_that_is_aborted_by_an_update_starts_again(fleet):
    run = fleet(1, in_flight="abort")
    run.load(1)
    run.fault(0, "", part_seconds=30.0)
    rows = run.rows(3, 1, stop=("\x01\x01",))
    thread = threading.Thread(target=run.run, args=(rows,))
    thread.start()
    run.until(lambda: len([e for e in run.records() if "running" in e]) == 3)
    run.until(lambda: all(row.tokens for row in rows._rows))
    run.fault(0)
    run.load(2)
    thread.join()
    done = rows.completions()
    # Tokens of the old weights are dropped.
    assert done.logprobs.values.tolist() == pytest.approx(run.logprobs(2, done.tokens.values.tolist()))
    assert run.pool.take_counters()["aborted"] == 3


def test_updates_reach_every_server(fleet):
    run = fleet(2)
    for version in (1, 2, 7):
        run.load(version)
        run.generate(4, 2, version=version)
        assert sorted(server for server, _, _ in run.pool.updates) == ["server 0", "server 1"]
        assert all(begin < end for _, begin, end in run.pool.updates)
    assert run.pool.in_flight() == {"server 0 requests": 0, "server 1 requests": 0}
    assert [e["loaded"] for e in run.records() if "loaded" in e].count(7) == 2
    folders = {p.name for p in run.channel.folder.iterdir()}
    assert folders == {"v2", "v7"}, "older versions are removed, but for the one whose files the next one overwrites"


@pytest.mark.parametrize(("in_flight", "version"), [("finish", 1), ("abort", 2)])
def test_requests_that_run_at_an_update_finish_or_start_again(fleet, in_flight, version):
    run = fleet(1, options=["--seconds", "1"], in_flight=in_flight)
    run.load(1)
    rows = run.rows(3, 1)
    thread = threading.Thread(target=run.run, args=(rows,))
    thread.start()
    run.until(lambda: len([e for e in run.records() if "running" in e]) == 3)
    run.load(2)
    thread.join()
    done = rows.completions()
    assert done.logprobs.values.tolist() == pytest.approx(run.logprobs(version, done.tokens.values.tolist()))
    assert run.pool.take_counters().get("aborted", 0) == (3 if in_flight == "abort" else 0)


def test_an_error_in_one_row_cancels_the_others_at_the_server(fleet):
    run = fleet(1, options=["--seconds", "60"])
    run.load(1)
    run.fault(0, "", seconds=0.0)
    rows = run.rows(1, 2)

    def feed(row, part, last):
        raise CreditgraphError("not this one")

    start = time.monotonic()
    with pytest.raises(CreditgraphError, match="not this one"):
        run.pool.generate(rows.start(), feed, rows.reset)
    assert time.monotonic() - start < 30
    assert run.pool.in_flight() == {"server 0 requests": 0}


def test_servers_that_are_running_are_found_by_their_rendezvous_file(fleet):
    first = fleet(2)
    listed = read_rendezvous(first.folder / "engines.json", 0.0)
    assert [a.name for a in listed] == ["server 0", "server 1"]
    guest = fleet(0, addresses=listed)
    guest.load(4)
    guest.generate()
    guest.close()
    first.load(5)
    first.generate()  # a guest's end leaves the servers alone


def test_another_server_at_an_address_is_refused(fleet):
    first = fleet(1)
    taken = dataclasses.replace(first.pool.servers[0].address, identity="creditgraph-0-somebody")
    with pytest.raises(
        RunError, match=r"expected server 'creditgraph-0-somebody' at this address, got 'creditgraph-0-"
    ):
        fleet(0, addresses=[taken], connect_seconds=0.5)


def test_an_address_that_does_not_answer_is_said_and_soon_given_up(fleet, monkeypatch, caplog):
    monkeypatch.setattr("creditgraph.components.engine.served.addresses.SAY_SECONDS", 0.2)
    nobody = Address(url="http://127.0.0.1:1", name="server 0")
    with pytest.raises(RunError, match=r"ready within 0\.7 s, .*Raise engine\.pool\.connect_seconds if"):
        fleet(0, addresses=[nobody], connect_seconds=0.7)
    said = [text for text in caplog.messages if text.startswith("waiting for server 0 ")]
    assert said
    assert " to respond: " in said[0]
    assert said[0].endswith(" of at most 1 s (engine.pool.connect_seconds)")
    assert VllmSettings().pool.connect_seconds <= 60


def test_two_runs_on_one_host_do_not_meet(fleet):
    one, two = fleet(2), fleet(2)
    one.load(1)
    two.load(2)
    one.generate(version=1)
    two.generate(version=2)
    assert len({s.address.url for run in (one, two) for s in run.pool.servers}) == 4


def test_a_chosen_port_that_is_taken_is_reported(fleet):
    first = fleet(1)
    port = int(first.pool.servers[0].address.url.rpartition(":")[2])
    with pytest.raises(
        ConfigError,
        match=rf"engine.pool.port: expected a free port .*, got {port}, .* engine.pool.port=0 to take free ports",
    ):
        fleet(1, port=port)


def test_a_port_taken_before_the_server_listens_costs_another_try(fleet, monkeypatch):
    first = fleet(1)
    taken = int(first.pool.servers[0].address.url.rpartition(":")[2])
    from creditgraph.components.engine.served import launched

    ports, real = [taken], launched.free_port
    monkeypatch.setattr(launched, "free_port", lambda *host: ports.pop() if ports else real(*host))
    monkeypatch.setattr(launched, "check_port", lambda *_: None)  # it was free then
    second = fleet(1)
    assert second.pool.servers[0].starts == 2
    second.load(1)
    second.generate()


def test_a_second_replica_has_names_logs_and_gpus_of_its_own(fleet):
    run = fleet(addresses=find_servers(ServerSettings(servers=1), replica=1, gpus=[["2", "3"]]))
    server = run.pool.servers[0]
    assert server.name.startswith("server 1.0 (127.0.0.1:")
    assert server.process.log == run.folder / "logs" / "engine-1.0.log"
    environment = Path(f"/proc/{run.pid(0)}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=2,3" in environment
    assert read_rendezvous(run.folder / "engines.json", 0.0)[0].name == "server 1.0"
