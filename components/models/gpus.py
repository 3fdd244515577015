"""Kinds of GPUs: their memory, and the rates that vendors state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU and its links: rates as stated by vendors, and the fractions of them that training achieves.

    Attributes:
        memory: bytes.
        bandwidth: bytes per second between memory and cores.
        matmul: dense bf16 operations per second.
        matmul_fraction: achieved fraction of `matmul` in a training step, including the time between matrix products.
        moe_fraction: the same for mixtures of experts, whose products are small and whose tokens are sorted.
        node: GPUs that share the fast link.
        fast, slow: bytes per second and GPU, one direction, inside a node and between nodes.
        link_fraction: fraction of links and memory bandwidth that collectives and decoding achieve.
        hidden: part of the data-parallel traffic that runs under the backward pass, where the learner overlaps them.
    """

    name: str = "h100"
    memory: float = 80e9
    bandwidth: float = 3.35e12
    matmul: float = 989e12
    matmul_fraction: float = 0.60
    moe_fraction: float = 0.17
    node: int = 8
    fast: float = 450e9
    slow: float = 50e9
    link_fraction: float = 0.75
    hidden: float = 0.8

    def rate(self, experts: int) -> float:
        """Operations per second that training achieves, on a model with that many experts per layer (0: dense)."""
        return self.matmul * (self.moe_fraction if experts else self.matmul_fraction)


DEVICES = {
    d.name: d
    for d in (
        Device(),
        Device(name="h200", memory=141e9, bandwidth=4.8e12),
        Device(name="b200", memory=180e9, bandwidth=8e12, matmul=2250e12, fast=900e9),
        Device(name="a100", memory=80e9, bandwidth=2.0e12, matmul=312e12, fast=300e9, slow=25e9),
        Device(name="l40s", memory=48e9, bandwidth=0.86e12, matmul=362e12, fast=32e9, slow=25e9),
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
