"""Every logged name has a definition, and every definition is logged by something."""

import ast
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from creditgraph.pipeline.core.registry import BUILTIN, load_class
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.executor import Executor
from creditgraph.pipeline.run.metrics import EXECUTOR_METRICS
from creditgraph.pipeline.run.run_directory import RunDirectory

DEFINITIONS = {use: load_class(use).metrics for use in BUILTIN}
ROOT = Path(__file__).resolve().parents[3]
CHEAP = [
    "prompts.batch=2",
    "evaluator.num_problems=2",
    "run.iterations=1",
    "run.checkpoint.every=0",
]
RUNS = {
    "toy_srpo": ["evaluator.samples=2"],
    "toy_dapo": ["evaluator.samples=2"],
    "toy_score": ["evaluator.samples=2"],
    "toy_grpo_stop": [],
}
FIRST_WORDS = ("mean", "share", "top", "add", "_meter")  # of the learner's meters: the name is their first argument


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> dict[str, tuple[dict[str, str], set[str]]]:
    """Recipe → (node → component, names in its metrics.jsonl)."""
    result = {}
    for recipe in RUNS:
        overrides = [
            f"recipe={recipe}",
            *CHEAP,
            *RUNS[recipe],
            f"run.root={tmp_path_factory.mktemp('runs')}",
            "run.wandb.mode=disabled",
        ]
        experiment = build_experiment(compose(overrides), recipe)
        with (
            RunDirectory.open(experiment.run_path, experiment.resolved) as run,
            Executor(
                experiment.graph, experiment.run, model=experiment.model, data=experiment.data, run=run
            ) as executor,
        ):
            executor.setup()
            executor.restore()
            executor.run()
            lines = run.metrics_path.read_text().splitlines()
        nodes = {node.name: node.use for node in experiment.graph.nodes}
        result[recipe] = (nodes, set(chain.from_iterable(json.loads(line) for line in lines)))
    return result


def strings(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def composed(text: ast.JoinedStr, words: list[str]) -> Iterator[str]:
    """What an f-string with one hole may become, filled by the words of its function and the module's constants."""
    before, after = ["".join(v.value for v in part if isinstance(v, ast.Constant)) for part in halves(text)]
    if before or after:
        yield from (before + word + after for word in words)


def halves(text: ast.JoinedStr) -> tuple[list[ast.expr], list[ast.expr]]:
    hole = next((i for i, v in enumerate(text.values) if isinstance(v, ast.FormattedValue)), len(text.values))
    return text.values[:hole], text.values[hole + 1 :]


def written(file: Path) -> tuple[set[str], set[str]]:
    """(names that certainly are metrics, strings that may be) of a source file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    sure, maybe = set(), set()
    top = [s for n in tree.body if isinstance(n, ast.Assign) for s in strings(n.value)]
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)):
        name, owner = call.func.attr, ast.unparse(call.func.value)
        if (name == "log" and owner.endswith("context")) or (name == "count" and owner.endswith(("self", "engine"))):
            sure |= {k.arg for k in call.keywords if k.arg}
        first = (
            call.args[0].value
            if call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
            else None
        )
        if first and name in FIRST_WORDS and "meter" in owner + name:
            sure.add(first)
        if first and name == "clock":
            sure.add(f"seconds_{first}")
        if first and name == "_timed":
            sure.add(first)
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)):
        words = [*strings(function), *top]
        maybe |= set(words)
        for text in (n for n in ast.walk(function) if isinstance(n, ast.JoinedStr)):
            maybe |= set(composed(text, words))
    return sure, maybe


@pytest.fixture(scope="module")
def sources() -> dict[Path, tuple[set[str], set[str]]]:
    files = list((ROOT / "components").rglob("*.py"))
    return {f: written(f) for f in files}


def test_definitions_are_complete():
    for use, metrics in DEFINITIONS.items():
        names = [m.name for m in metrics]
        assert len(names) == len(set(names)), use
        assert all(m.unit and m.text for m in metrics), use


@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_logs_documented_names_only(logged, recipe):
    nodes, names = logged[recipe]
    assert len(names) > 30
    for name in names:
        node, _, rest = name.partition("/")
        known = DEFINITIONS[nodes[node]] if node in nodes and rest else EXECUTOR_METRICS
        assert any(metric.fits(rest if node in nodes and rest else name) for metric in known), name


def test_names_in_the_source_are_documented(sources):
    for file, (sure, _) in sources.items():
        known = [m for metrics in DEFINITIONS.values() for m in metrics]
        parts = {"mismatch_weight", "mismatch_weight_square"}  # sums of which a metric is made
        unknown = [name for name in sorted(sure - parts) if not any(m.fits(name) for m in known)]
        assert unknown == [], f"{file}: declare them in `metrics` and call tools/update_docs"


def test_every_definition_is_logged(logged, sources):
    """By one of the runs; else, for what no cheap run reaches, by a name in the source of the component's folder."""
    seen = {
        (use, name.partition("/")[2])
        for nodes, names in logged.values()
        for node, use in nodes.items()
        for name in names
        if name.startswith(f"{node}/")
    }
    for use, metrics in DEFINITIONS.items():
        folder = Path(*BUILTIN[use].partition(":")[0].split(".")[1:3])
        shared = {
            "components/learner",
            "components/sampler",
            "components/advantage",
            "components/rollouts",
            str(folder),
        }
        words = set().union(
            *(sure | maybe for f, (sure, maybe) in sources.items() if any(f.is_relative_to(ROOT / s) for s in shared))
        )
        for metric in metrics:
            ran = any(metric.fits(name) for which, name in seen if which == use)
            # Of a name with a place to fill in, the source has the part before it.
            named = metric.name in words or ("<" in metric.name and metric.name.partition("<")[0] in words)
            assert ran or named, f"{use}: nothing logs '{metric.name}'; remove it from `metrics`"


def test_every_number_of_the_executor_is_logged(logged):
    names = set().union(*(names for _, names in logged.values()))
    source = "".join((ROOT / "pipeline" / "run" / f).read_text() for f in ("node_runner.py", "executor.py"))
    for metric in EXECUTOR_METRICS:
        literal = metric.name.partition("<")[0]
        assert any(metric.fits(n) for n in names) or f'"{literal}' in source, metric.name
