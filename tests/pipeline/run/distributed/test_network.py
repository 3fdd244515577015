"""Interfaces, and the sentences about networks that do not connect; gloo stands for NCCL."""

import multiprocessing
import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from creditgraph.pipeline.core.ranks import Ranks
from creditgraph.pipeline.run.distributed import network
from creditgraph.pipeline.run.distributed.processes import run_together
from creditgraph.pipeline.run.distributed.team import DistributedError, Rendezvous

RANKS = Ranks(rank=1, world=2)


@pytest.fixture
def cards(monkeypatch):
    """Two networks with addresses, one of which leads to 10.0.0.1."""
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "10.1.0.7"})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)


def test_interfaces_of_this_host():
    assert network.interfaces()["lo"] == "127.0.0.1"
    assert network.interface_to("127.0.0.1") == ""
    assert network.interface_to("no.such.host.invalid") == ""


def test_gloo_takes_the_interface_through_which_rank_0_is_reached(cards, monkeypatch):
    class Route(socket.socket):
        def connect(self, address):
            pass

        def getsockname(self):
            return ("10.1.0.7", 1)

    monkeypatch.setattr(network.socket, "socket", Route)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    network.choose_interface("10.1.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    network.choose_interface("10.1.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def test_work_that_does_not_return_and_work_that_fails():
    network.within(5.0, lambda: None)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        network.within(0.05, threading.Event().wait)
    with pytest.raises(ZeroDivisionError):
        network.within(5.0, lambda: 1 // 0)


def test_nccl_that_hangs_says_what_it_tried_and_what_to_set(cards, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda held: threading.Event().wait())
    with pytest.raises(DistributedError) as raised:
        network.connect_gpus(RANKS, "cpu", seconds=0.05)
    said = str(raised.value)
    assert "nccl did not connect the 2 processes (no answer in 0.05 s); it chose an interface itself" in said
    assert "with all InfiniBand adapters; this host has lo 127.0.0.1, eth0 10.0.0.7, ib0 10.1.0.7. " in said
    assert "Set cluster.interface (without SLURM, NCCL_SOCKET_IFNAME) to one through which all hosts" in said
    assert "NCCL_DEBUG=INFO prints what NCCL tries" in said


def test_nccl_that_fails_names_the_interface_it_was_given(cards, monkeypatch):
    def fail(held):
        raise dist.DistBackendError("NCCL error: unhandled system error\nmore")

    monkeypatch.setattr(dist, "all_reduce", fail)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    with pytest.raises(DistributedError) as raised:
        network.connect_gpus(RANKS, "cpu")
    said = str(raised.value)
    assert (
        "(NCCL error: unhandled system error); it tried ib0 (NCCL_SOCKET_IFNAME), with the InfiniBand adapters" in said
    )
    monkeypatch.setattr(dist, "all_reduce", lambda held: held)
    with pytest.raises(DistributedError, match="a sum of 2 ones is 1"):
        network.connect_gpus(RANKS, "cpu")
    monkeypatch.setattr(dist, "all_reduce", lambda held: held.mul_(2))
    network.connect_gpus(RANKS, "cpu")


def test_the_first_exchange_is_on_the_gpu_of_this_rank(monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch, "ones", lambda size, device: used.append(device) or torch.zeros(1))
    monkeypatch.setattr(dist, "all_reduce", lambda held: held.add_(2))
    network.connect_gpus(RANKS, "cuda:1")
    assert used == [torch.device("cuda:1"), "cuda:1"]


def _meet(rank, port, interface):
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    meeting = Rendezvous(ranks=Ranks(rank=rank, world=2), address="127.0.0.1", port=port, hosts_store=rank == 0)
    run_together(meeting, Ranks(rank=rank, world=2, num_replicas=2), "cpu", lambda team: team.barrier() or 0)


@pytest.mark.parametrize(("interface", "code"), [("lo", 0), ("ib7", 2)])
def test_ranks_with_and_without_the_interface(capfd, interface, code):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=_meet, args=(r, port, interface)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [code, code]
    if code:
        said = capfd.readouterr().err
        assert "rank 1 (" in said
        assert "gloo did not connect the 2 processes (" in said
        assert "it tried ib7 (GLOO_SOCKET_IFNAME); this host has lo 127.0.0.1" in said
