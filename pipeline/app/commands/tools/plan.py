"""`creditgraph plan`: which tensor × pipeline × data parallel layout to take, from a model of memory and step time on
paper (docs/scaling.md)."""

from __future__ import annotations

import argparse
from dataclasses import replace

from pipeline.app.cluster.layout_plan import DEVICES, SHAPES, Estimate, Layout, Shape, Work, estimate, plan
from pipeline.core.errors import ConfigError

SUMMARY = "Propose tensor, pipeline and data parallel sizes for a model."

# (model, layout, sequences of 8,192 tokens per optimiser step, TFLOP/s per GPU): pre-training on H100 in fp8, from the
# performance summary of Megatron-Bridge, 8B of release 25.11 and the others of 26.02. 8B ran with sharded weights
# (FSDP), 405B with context parallelism of 2, which is counted as data parallelism here.
PUBLISHED = [
    ("llama3-8b", Layout(world=8), 128, 744),
    ("llama3-70b", Layout(world=64, tensor=4, pipeline=8, virtual=5), 256, 728),
    ("llama3.1-405b", Layout(world=1024, tensor=8, pipeline=8, virtual=8), 1536, 784),
]
FP8 = replace(DEVICES["h100"], matmul=2 * DEVICES["h100"].matmul, matmul_fraction=0.48)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph plan qwen2.5-32b --gpus 64\n"
        "  creditgraph plan PATH/config.json --gpus 8 --device a100 --tokens 1e6 --length 8192\n"
        "  creditgraph plan --check"
    )
    parser.add_argument("model", nargs="?", help=f"{', '.join(SHAPES)}, or a config.json of a dense model")
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
        raise ConfigError("plan: expected a model and a positive number of GPUs, or --check.")
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
    parts = [("compute", e.compute), ("bubble", e.bubble), ("TP", e.tensor_traffic), ("DP", e.data_traffic)]
    where = ", ".join(f"{name} {seconds / e.seconds:.0%}" for name, seconds in parts if seconds / e.seconds >= 0.005)
    return f"{e.layout!s:<44} {e.memory / 1e9:5.0f} GB  {e.seconds:8.2f} s  MFU {e.utilisation:.0%}  ({where})"


def check() -> None:
    """Prints the model's throughput beside published figures."""
    print("Pre-training on H100 in fp8, TFLOP/s per GPU")
    for name, layout, sequences, published in PUBLISHED:
        e = estimate(SHAPES[name], layout, Work(tokens=sequences * 8192, length=8192, pack=8192), FP8)
        ours = e.utilisation * FP8.matmul / 1e12
        print(
            f"  {name:<14} {layout!s:<28} published {published}  ours {ours:.0f}  ratio {ours / published:.2f}  "
            f"memory {e.memory / 1e9:.0f} GB"
        )
