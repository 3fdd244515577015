"""A suite of two small tasks, its evaluation from the command line, and what an evaluation writes."""

import pyarrow.parquet as pq
import yaml

from creditgraph.pipeline.app.cli import main

SUITE = {
    "title": "Small",
    "version": 1,
    "resamples": 500,
    "defaults": {
        "mode": "thought",
        "max_tokens": 96,
        "samples": 4,
        "k": [2, 4],
        "verifier": {"use": "eval_toys:LoggedExact"},
    },
    "tasks": {
        "one": {"data": "chains_one", "problems": 5},
        "late": {"data": "chains_late", "problems": 4, "greedy": False},
    },
}
SMALL = [
    "prompts.batch=2",
    "evaluator.num_problems=2",
    "evaluator.every=0",
    "data.train.size=300",
    "data.eval.size=4",
    "run.device=cpu",
]


def write_suite(folder, **changes):
    (folder / "suite").mkdir(parents=True, exist_ok=True)
    (folder / "suite" / "small.yaml").write_text(yaml.safe_dump({**SUITE, **changes}, sort_keys=False))
    return str(folder)


def evaluate(configs, *arguments):
    return main(["eval", "suite=small", *arguments, "-c", configs])


def items(folder):
    """File name → bytes, of everything an evaluation records."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != "lock"
    }


def records(folder, task):
    return pq.read_table(folder / "items" / task).to_pylist()
