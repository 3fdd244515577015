"""`creditgraph plan`: which tensor × pipeline × data parallel layout to take, from a model of memory and step time on
paper (docs/scaling.md)."""

from __future__ import annotations

import argparse
from dataclasses import replace

from creditgraph.components.models.gpus import DEVICES
from creditgraph.components.models.shape import SHAPES, Shape
from creditgraph.pipeline.app.cluster.layout_plan import Estimate, Layout, Work, estimate, plan
from creditgraph.pipeline.core.errors import ConfigError

SUMMARY = "Propose tensor, pipeline and data parallel sizes for a model."

H100 = DEVICES["h100"]
# Products in fp8 are twice as fast; 48 % of that was reached, set before the comparison.
FP8 = replace(H100, matmul=2 * H100.matmul, matmul_fraction=0.48)
# (model, layout, sequences per optimiser step, their tokens, TFLOP/s per GPU, device): pre-training on H100, from the
# performance summary of Megatron-Bridge, 8B and mixtures of experts of release 25.11 and the others of 26.02. Dense
# models ran in fp8, 8B with sharded weights (FSDP), 405B with context parallelism of 2, counted as data parallelism.
# What mixtures of experts reach is no larger in fp8 (30B-A3B), so they count with the rate of bf16.
PUBLISHED = [
    ("llama-3.1-8b", Layout(world=8), 128, 8192, 744, FP8),
    ("llama3-70b", Layout(world=64, tensor=4, pipeline=8, virtual=5), 256, 8192, 728, FP8),
    ("llama3.1-405b", Layout(world=1024, tensor=8, pipeline=8, virtual=8), 1536, 8192, 784, FP8),
    ("qwen3-30b-a3b-base", Layout(world=16, pipeline=2, virtual=24, expert=8), 512, 4096, 121, H100),
    ("gpt-oss-120b", Layout(world=64, pipeline=4, expert=8), 512, 4096, 153, H100),
]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph plan qwen2.5-32b --gpus 64\n"
        "  creditgraph plan PATH/config.json --gpus 8 --device a100 --tokens 1e6 --length 8192\n"
        "  creditgraph plan --check"
    )
    parser.add_argument("model", nargs="?", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--device", choices=sorted(DEVICES), default="h100")
    parser.add_argument("--tokens", type=float, default=512 * 4096, help="trained tokens of one iteration")
    parser.add_argument("--length", type=float, default=4096, help="tokens of one sequence")
    parser.add_argument("--pack", type=int, default=8192, help="tokens of one micro-batch")
    parser.add_argument("--steps", type=int, default=1, help="optimiser steps per iteration")
    parser.add_argument(
        "--forward-passes", type=int, default=0, help="forward-only passes: recomputed old log-probs, reference"
    )
    parser.add_argument("--reserved", type=float, default=0.15, help="part of the memory left to others")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare its throughput with published figures")


def main(options: argparse.Namespace) -> int:
    """Prints the fastest layouts that fit."""
    if options.check:
        check()
        return 0
    if not options.model or options.gpus < 1:
        raise ConfigError("expected a model and a positive number of GPUs, or --check.")
    shape = SHAPES.get(options.model) or Shape.read(options.model)
    work = Work(
        tokens=options.tokens,
        length=options.length,
        pack=options.pack,
        steps=options.steps,
        forward_passes=options.forward_passes,
        reserved=options.reserved,
    )
    device = DEVICES[options.device]
    print(f"{shape.name}: {shape.parameters / 1e9:.2f} B parameters; {options.gpus} × {device.name}")
    for e in plan(shape, options.gpus, work, device)[: options.top]:
        print(line(e))
    return 0


def line(e: Estimate) -> str:
    """One layout: memory, seconds, utilisation, and where the time goes."""
    parts = [(name, seconds / e.seconds) for name, seconds in e.times.items()]
    where = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)
    return f"{e.layout!s:<44} {e.memory / 1e9:5.0f} GB  {e.seconds:8.2f} s  MFU {e.utilisation:.0%}  ({where})"


def check() -> None:
    """Prints the model's throughput beside published figures."""
    print("Pre-training on H100, TFLOP/s per GPU")
    for name, layout, sequences, length, published, device in PUBLISHED:
        e = estimate(SHAPES[name], layout, Work(tokens=sequences * length, length=length, pack=8192), device)
        ours = e.utilisation * device.matmul / 1e12
        print(
            f"  {name:<18} {layout!s:<28} published {published}  ours {ours:.0f}  ratio {ours / published:.2f}  "
            f"memory {e.memory / 1e9:.0f} GB"
        )
