"""The network between ranks: the interface that gloo takes, and what to say when a network does not connect them.

NCCL tries by itself, sometimes without an end; so its first exchange runs in a thread of its own, and the process ends
when that does not return. NCCL has not been run; the tests have gloo in its place.
"""

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from creditgraph.pipeline.core.ranks import Ranks, use_device
from creditgraph.pipeline.run.distributed.team import DistributedError

_SIOCGIFADDR = 0x8915  # ioctl: IPv4 address of an interface
CONNECT_TIMEOUT = 180.0  # seconds in which ranks that have met must have connected


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; OSError without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def interfaces() -> dict[str, str]:
    """Interfaces of this host with an IPv4 address, and that address."""
    out = {}
    for _, name in socket.if_nameindex():
        try:
            out[name] = address_of(name)
        except OSError:  # it has none
            continue
    return out


def interface_to(host: str) -> str:
    """The interface through which a host is reached; "" for this host's loopback, or when that cannot be known."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # of a datagram socket; nothing is sent
            own = probe.getsockname()[0]
    except OSError:
        return ""
    if own.startswith("127."):
        return ""
    return next((name for name, address in interfaces().items() if address == own), "")


def choose_interface(host: str) -> None:
    """Has gloo use the interface through which rank 0's host is reached; its own choice is that of the host name."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_to(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def within(seconds: float, work: Callable[[], object]) -> None:
    """Runs work that may never return, in a thread; raises its error, or TimeoutError while the thread goes on."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="connect", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer in {seconds:g} s")
    if errors:
        raise errors[0]


def not_connected(backend: str, ranks: Ranks, error: BaseException) -> DistributedError:
    """The error of ranks that a network does not connect: which interface was tried, and what to set."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    set_by = f"{backend.upper()}_SOCKET_IFNAME"
    here = ", ".join(f"{name} {address}" for name, address in interfaces().items())
    chosen = os.environ.get(set_by)
    tried = f"it tried {chosen} ({set_by})" if chosen else f"it chose an interface itself ({set_by} is not set)"
    step = f"Set cluster.interface (without SLURM, {set_by}) to one through which all hosts are reached"
    if backend == "nccl":
        adapters = os.environ.get("NCCL_IB_HCA")
        tried += f", with the InfiniBand adapters {adapters}" if adapters else ", with all InfiniBand adapters"
        step += (
            ", and cluster.ib_hca (NCCL_IB_HCA) to the adapters that are connected; NCCL_IB_DISABLE=1 does without "
            "them, and NCCL_DEBUG=INFO prints what NCCL tries"
        )
    return DistributedError(
        f"rank {ranks.rank} ({socket.gethostname()}): {backend} did not connect the {ranks.world} processes ({said}); "
        f"{tried}; this host has {here}. {step}."
    )


def connect_gpus(ranks: Ranks, device: str, seconds: float = CONNECT_TIMEOUT) -> None:
    """The first exchange between GPUs, which makes NCCL's connections; DistributedError when they fail or hang."""

    def exchange() -> None:
        use_device(device)  # of this thread
        held = torch.ones(1, device=device)
        dist.all_reduce(held)
        if float(held) != ranks.world:
            raise RuntimeError(f"a sum of {ranks.world} ones is {float(held):g}")

    try:
        within(seconds, exchange)
    except (RuntimeError, TimeoutError) as error:  # torch's own are RuntimeErrors
        raise not_connected("nccl", ranks, error) from error
