"""`creditgraph simulate`: how a measured run would go on other numbers of GPUs."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.app.cluster.measured import Measured, measure
from pipeline.app.cluster.settings import load_cluster, split_overrides
from pipeline.app.cluster.simulate import Simulated, simulate
from pipeline.app.report.source import read_run
from pipeline.core.errors import ConfigError
from pipeline.run.run_directory import writing

# Named by text: pipeline/ imports nothing of components/.
SCALE = "pipeline.app.cluster.scale_plan"
SHAPES = "pipeline.app.cluster.layout_plan"


def main(options: argparse.Namespace) -> int:
    """Prints the tables; writes JSON and a picture where asked."""
    name, own, rest = split_overrides(options.overrides)
    if rest:
        raise ConfigError(
            f"simulate: found {rest[0]}; wanted cluster=NAME or cluster.setting=value. The recipe is that of "
            "--measured."
        )
    measured = measure(read_run(Path(options.measured)), options.replicas)
    for note in measured.notes:
        print(f"note: {note}")
    rows = [_row(1, f"weights@{k}", s) for k, s in here(measured, options.delays, options.seed).items()]
    print(
        f"{options.measured}: measured at weights@{measured.plan.delay}, median "
        f"{statistics.median(measured.seconds):.3f} s an iteration"
    )
    print(table(rows, ["mode", "seconds", "tokens/s", "engine busy", "learner busy"]))
    if options.model:
        cluster = load_cluster(name or "disaggregated", own, options.config_dir)
        scale: Any = importlib.import_module(SCALE)
        shapes: Any = importlib.import_module(SHAPES)
        if options.device not in shapes.DEVICES:
            raise ConfigError(f"--device {options.device}: wanted one of {', '.join(shapes.DEVICES)}.")
        fleet = scale.Fleet(
            shape=shapes.SHAPES.get(options.model) or shapes.Shape.read(options.model),
            device=shapes.DEVICES[options.device],
            node=cluster.gpus_per_node or 8,
            tensor=cluster.gpus_per_server,
            rollouts=options.rollouts,
            per_gpu=options.per_gpu,
            length=options.length,
            prompt=options.prompt,
            seed=options.seed,
        )
        rows = [
            {**_row(f.gpus, f.mode, f.simulated), "engine:learner GPUs": _split(f), "layout": f.layout}
            for f in scale.scale(measured, fleet, options.gpus, options.delays)
        ]
        if not rows:
            raise ConfigError(
                f"simulate: {options.model} fits on none of {options.gpus} GPUs; wanted more of them, or a smaller "
                "model."
            )
        about = asdict(fleet) | {"shape": fleet.shape.name, "device": fleet.device.name}
        print("\n" + ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in about.items()))
        print(table(rows, list(rows[0])))
    if options.json:
        with writing(Path(options.json)):
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {options.json}")
    if options.picture:
        draw(rows, Path(options.picture))
        print(f"wrote {options.picture}")
    return 0


def here(measured: Measured, delays: list[int], seed: int) -> dict[int, Simulated]:
    """The measured run itself, at each delay: what overlap would bring on the same machine, if its two sides did not disturb each other."""
    return {k: simulate(replace(measured.plan, delay=k), 40, seed) for k in delays}


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Rows as a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *([_text(row[c]) for c in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    """Tokens per second and bubble over the number of GPUs, one line per mode; .svg or .png."""
    import vl_convert

    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": "white",
        "data": {"values": rows},
        "hconcat": [
            {
                "width": 320,
                "height": 220,
                "mark": {"type": "line", "point": True},
                "encoding": {
                    "x": {"field": "GPUs", "type": "quantitative", "scale": {"type": "log", "base": 2}},
                    "y": {"field": field, "type": "quantitative", "scale": {"type": kind}, "axis": {"format": shown}},
                    "color": {"field": "mode", "type": "nominal", "sort": None},
                },
            }
            for field, kind, shown in (("tokens/s", "log", "~s"), ("bubble", "linear", "%"))
        ],
    }
    with writing(target):
        if target.suffix == ".svg":
            target.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
        elif target.suffix == ".png":
            target.write_bytes(vl_convert.vegalite_to_png(spec, scale=2))
        else:
            raise ConfigError(f"--picture {target}: wanted a name that ends in .svg or .png.")


def _row(gpus: int, mode: str, simulated: Simulated) -> dict[str, Any]:
    return {
        "GPUs": gpus,
        "mode": mode,
        "seconds": simulated.iteration,
        "iterations/h": 3600 / simulated.iteration,
        "tokens/s": simulated.tokens_per_second,
        "engine busy": simulated.engine_busy,
        "engine full": simulated.engine_full,
        "learner busy": simulated.learner_busy,
        "bubble": simulated.bubble,
    }


def _split(found: Any) -> str:
    return "all" if found.mode == "colocated" else f"{found.engine_gpus}:{found.learner_gpus}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
    return str(value)
