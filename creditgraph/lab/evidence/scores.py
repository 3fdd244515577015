"""Scores of credit for the methods of measured cells, at three states of the policy: `tools/evidence --scores`.

A family's policy is taken as it starts, and after a third and two thirds of the budget of its first measured cell, as
that cell's first method trains it. At each state `creditgraph creditbench` judges all methods of the family's cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from creditgraph.lab.bench.methods import Method
from creditgraph.lab.evidence.declaration import Entry, Point, rated
from creditgraph.lab.evidence.measure import Lab
from creditgraph.lab.prediction.cells import read_json, scores_of
from creditgraph.pipeline.core.handles import Environments

STATES = {"start": 0.0, "third": 1 / 3, "two_thirds": 2 / 3}
"""name → share of the budget that the policy was trained for"""
SEEDS = ("0", "1")
SAMPLES = 16  # continuations per state
ROWS = 64  # responses of a method, and seed, that get true values
PROMPTS = "prompts.batch="  # a setting of runs; scores take the default, since gradients need many prompts
PLACES = 4


@dataclass(frozen=True, kw_only=True)
class ScoreBench:
    """Judges the credit of the methods of measured cells.

    Attributes:
        lab: the declaration, and the folder where runs go.
        results: cell → its entry of results.json.
        launch: runs `creditgraph` with arguments, its output in a file, and returns the exit code.
        jobs: commands at a time.
        say: receives progress as sentences.
    """

    lab: Lab
    results: Mapping[str, dict[str, Any]]
    launch: Callable[[list[str], Path], int]
    jobs: int
    say: Callable[[str], None]

    def measure(self, names: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Entries of scores.json for the families of these cells, as far as they have results, and what failed.

        All measured cells of a family are judged together, so that its policy is the same whichever cells are named.
        """
        wanted = {self.lab.cell(name).family for name in names}
        families: dict[str, list[str]] = {}
        for name in self.results:
            if (family := self.lab.cell(name).family) in wanted:
                families.setdefault(family, []).append(name)
        # Here and not in the threads, because configurations are composed one at a time.
        suites = {family: self._suite(family, cells[0]) for family, cells in families.items()}
        with ThreadPoolExecutor(max_workers=self.jobs) as pool:
            tasks = {family: pool.submit(self._policy, family, cells[0]) for family, cells in families.items()}
            policies = {family: task.result() for family, task in tasks.items()}
            bench = {
                (family, state): pool.submit(self._judge, family, state, share, policies[family], suites[family], cells)
                for family, cells in families.items()
                for state, share in STATES.items()
            }
            failed = [problem for task in bench.values() if (problem := task.result())]
        measured: dict[str, Any] = {}
        for family, state in bench:
            judged = _judged(_credit(policies[family], state))
            for cell in families[family]:
                entries = self.lab.cell(cell).methods.items()
                known = {name: _rounded(scores_of(judged[text])) for name, e in entries if (text := _text(e)) in judged}
                if not known:
                    continue
                measured.setdefault(cell, {"family": family, "scores": {}})["scores"][state] = known
        return measured, failed

    def _folder(self, family: str) -> Path:
        return self.lab.folder / "scores" / family

    def _policy(self, family: str, cell: str) -> Path:
        """The run whose checkpoints are the states; its first method, at the rate that the cell froze."""
        name = next(iter(self.lab.cell(cell).methods))
        row = self.results[cell]["methods"][name]
        plan = self.lab.plan(cell, sweep=False)
        kept = ("run.checkpoint.every=1", "run.checkpoint.keep=1000")
        plan = replace(plan, folder=self._folder(family), overrides=(*plan.overrides, *kept))
        method = rated(name, self.lab.cell(cell), Point(row["lr"], row.get("batch", 0)), plan.overrides)
        self.lab.train(plan, [method], [0])
        return plan.folder / plan.name(method, 0)

    def _suite(self, family: str, cell: str) -> str:
        """What creditbench is to judge: turns where the graph has an environment, else responses."""
        first = next(iter(self.lab.cell(cell).methods.values()))
        graph = Method("", first.recipe).experiment(*self.lab.declaration.families[family].settings).graph
        return "turns" if any(node.outputs_of(Environments) for node in graph.nodes) else "responses"

    def _judge(self, family: str, state: str, share: float, policy: Path, suite: str, cells: list[str]) -> str:
        """Runs creditbench for the methods that are not judged yet; "" or what went wrong."""
        folder = _credit(policy, state)
        settings = self.lab.declaration.families[family].settings
        entries = [entry for cell in cells for entry in self.lab.cell(cell).methods.values()]
        texts = [text for text in dict.fromkeys(map(_text, entries)) if text not in _judged(folder)]
        if not texts:
            return ""
        # Results of earlier calls stay; the prompts and rollouts of a seed and a policy are the same in all of them.
        out = folder / str(len(list(folder.glob("*/result.json"))))
        arguments = ["creditbench", "--suite", suite]
        arguments += ["--methods", *texts, *(f"--set={setting}" for setting in settings), "--seeds", *SEEDS]
        arguments += ["--samples", str(SAMPLES), "--max-rows", str(ROWS), "--output", str(out)]
        if share:
            done = len(list((policy / "checkpoints").glob("0*")))
            arguments += ["--run", str(policy), "--iteration", str(max(round(share * done) - 1, 0))]
        self.say(f"{family}: {state}")
        log = out.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        missing = (
            "any method" if self.launch(arguments, log) else ", ".join(sorted(set(texts) - _judged(folder).keys()))
        )
        return f"{family}, {state}: no scores of {missing}, see {log}" if missing else ""


def _credit(policy: Path, state: str) -> Path:
    """Where a policy's results are: those of another policy, whose cell was measured again, are not taken for its."""
    return policy.with_name(f"credit-{policy.name}") / state


def _judged(folder: Path) -> dict[str, Any]:
    """Method as creditbench was asked for it → what it found; methods that failed there are not among them."""
    methods: dict[str, Any] = {}
    for file in sorted(folder.glob("*/result.json")):
        methods |= read_json(file).get("methods", {})
    return methods


def _text(entry: Entry) -> str:
    """A method as `creditgraph creditbench --methods` takes it."""
    return ",".join([entry.recipe, *(s for s in entry.set if not s.startswith(PROMPTS))])


def _rounded(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.{PLACES}g}") for name, value in scores.items()}
