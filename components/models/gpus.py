"""Kinds of GPUs: their memory and their rate, as vendors state them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of GPU.

    Attributes:
        memory: bytes.
        matmul: dense bf16 operations per second, as stated by the vendor.
    """

    name: str = "h100"
    memory: float = 80e9
    matmul: float = 989e12


DEVICES = {
    d.name: d
    for d in (
        Device(),
        Device(name="h200", memory=141e9),
        Device(name="b200", memory=180e9, matmul=2250e12),
        Device(name="a100", memory=80e9, matmul=312e12),
        Device(name="l40s", memory=48e9, matmul=362e12),
    )
}


def kind_of(name: str) -> Device | None:
    """The kind of a GPU by the name that its driver gives it; None for one that is not in the table.

    >>> kind_of("NVIDIA H200 NVL").name, kind_of("NVIDIA GeForce RTX 4090")
    ('h200', None)
    """
    words = name.lower().replace("-", " ").split()
    return next((device for kind, device in DEVICES.items() if kind in words), None)


def own_kind(device: str) -> Device | None:
    """The kind of a device of this process ("cuda:0"); None for a CPU, or for a GPU that is not in the table."""
    if not device.startswith("cuda"):
        return None
    import torch

    return kind_of(torch.cuda.get_device_name(device))
