"""Credit of several recipes for the rollouts that a run has recorded, beside true advantages; the logic behind `creditgraph credit`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from components.rollouts.segments import segment_of_token
from components.rollouts.thoughts import has_oracle
from pipeline.app.bench.credit_run import learner_of
from pipeline.app.bench.judging import effective_credit, per_thought
from pipeline.app.bench.statistics import pearson
from pipeline.app.bench.truth import Truth, thought_ends, true_values
from pipeline.core.component import Context
from pipeline.core.errors import ConfigError, CreditgraphError, RunError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Credit, Policy, Prompts, Sampling, Trajectories, Verifier
from pipeline.core.sockets import Node, Wire
from pipeline.core.streams import Stream
from pipeline.run.compose import Experiment, build_experiment, compose
from pipeline.run.node_runner import NodeFailure, NodeRunner, set_origin
from pipeline.run.replay import Replay
from pipeline.run.values import as_inputs

# Samplers whose chains have no structure of their own, so that any chains may stand in for theirs.
PLAIN = ("sampler.chains", "sampler.dynamic", "sampler.failures")
TRUTH = "true advantage"


@dataclass
class Column:
    """One method's credit for the chosen rollouts.

    Attributes:
        name: recipe.
        note: what to know: further sampling, stand-ins, or why there is no credit.
        credit: Jagged float64 over response tokens, as the objective makes it at ratio 1 (0 where masked); None
            without.
        mask: Jagged bool, tokens that are trained on.
        pearson: correlation per thought with the true advantage; NaN without.
    """

    name: str
    note: str = ""
    credit: Jagged | None = None
    mask: Jagged | None = None
    pearson: float = math.nan


@dataclass
class Comparison:
    """Columns over the same rows.

    Attributes:
        iteration: recorded iteration of the rollouts.
        prompts, trajectories: what was judged; `trajectories` are the chosen rows.
        ends: Jagged int32, thought ends.
        reward: outcome per row.
        columns: one per recipe, then the truth where there is one.
        error: 1-based first wrong thought per row, 0 where there is none or the task cannot tell.
        tokenizer: of the policy.
        notes: on the run.
    """

    iteration: int
    prompts: Prompts
    trajectories: Trajectories
    ends: Jagged
    reward: list[float]
    columns: list[Column]
    error: list[int]
    tokenizer: Any
    notes: list[str] = field(default_factory=list)


def compare(
    path: Path,
    recipes: Sequence[str],
    overrides: Sequence[str],
    config_dirs: Sequence[str],
    iteration: int | None,
    rows: int,
    samples: int,
) -> Comparison:
    """Judges recorded rollouts by each recipe.

    Args:
        path: run directory with recorded prompts and trajectories.
        recipes: names.
        overrides: further settings for every recipe.
        config_dirs: further folders with recipes.
        iteration: a recorded one; None takes the newest whose policy the run can restore exactly.
        rows: rollouts to show.
        samples: continuations per thought for the true advantage; 0 leaves it out, and so does a task without known
            steps.
    """
    experiments = {r: build_experiment(compose([f"recipe={r}", *overrides], config_dirs), r) for r in recipes}
    replay = Replay(path)
    try:
        return _compare(replay, experiments, iteration, rows, samples)
    finally:
        replay.close()


def _compare(
    replay: Replay, experiments: dict[str, Experiment], iteration: int | None, rows: int, samples: int
) -> Comparison:
    graph = replay.graph
    wire = learner_of(graph).wires["trajectories"][0]
    iteration = _iteration(replay, wire) if iteration is None else iteration
    source = _Source(replay, iteration, replay.value(wire, iteration))
    chosen = _choose(source, rows)
    trajectories = source.population.select(chosen)
    known = _truth(source, trajectories, samples)
    columns = [_column(name, experiment, source, chosen, known) for name, experiment in experiments.items()]
    if known is not None:
        tokens = trajectories.response_tokens
        spread = tokens.with_values(known.advantage.values[segment_of_token(known.ends, tokens)])
        told = f"{samples} continuations per thought; {known.sampled_tokens:,} tokens sampled for it"
        columns.append(
            Column(TRUTH, told, spread, tokens.with_values(torch.ones(len(tokens.values), dtype=torch.bool)), math.nan)
        )
    elif samples:
        replay.notes.append("the task does not know its steps, so no true advantage is shown")
    rewards = source.verifier.verify(source.prompts, trajectories)
    return Comparison(
        iteration=iteration,
        prompts=source.prompts,
        trajectories=trajectories,
        ends=thought_ends(trajectories, source.policy),
        reward=rewards.value.tolist(),
        columns=columns,
        error=known.error.tolist() if known is not None else [0] * len(trajectories),
        tokenizer=source.policy.tokenizer,
        notes=list(dict.fromkeys(replay.notes)),
    )


class _Source:
    """The run's side: its rollouts, prompts, policy and verifier of one iteration."""

    def __init__(self, replay: Replay, iteration: int, population: Trajectories) -> None:
        self.replay, self.iteration, self.population = replay, iteration, population
        self.prompts: Prompts = self._first(Prompts)
        self.policy: Policy = self._first(Policy)
        self.verifier: Verifier = self._first(Verifier)

    def _first(self, kind: type) -> Any:
        for node in self.replay.graph.nodes:
            for output, socket in node.sockets.outputs.items():
                if socket.carries(kind):
                    return self.replay.value(Wire(node.name, output), self.iteration)
        raise ConfigError(
            f"{self.replay.path}: its graph has no {kind.__name__}; wanted a run that samples and judges."
        )

    def sampling(self) -> Sampling:
        """How the run's rollouts were sampled."""
        for node in self.replay.graph.nodes:
            if _samples_rollouts(node) and hasattr(node.config, "sampling"):
                found: Sampling = node.config.sampling()
                return found
        raise ConfigError(f"{self.replay.path}: no node says how its rollouts were sampled.")


def _iteration(replay: Replay, wire: Wire) -> int:
    folder = replay.path / "record" / f"{wire.source}.{wire.output}"
    there = sorted(int(p.stem) for p in folder.glob("*.parquet")) if folder.is_dir() else []
    if not there:
        raise RunError(
            f"{replay.path}: {wire} is not recorded, so there are no rollouts to judge; train with run.record.every=1 "
            "and "
            "run.record.outputs=all."
        )
    saved = {number for number, _ in replay.checkpoints()}
    exact = [i for i in there if i == 0 or i - 1 in saved]
    return exact[-1] if exact else there[-1]


def _choose(source: _Source, rows: int) -> torch.Tensor:
    """Rows of prompts with right and wrong answers first: a wrong and a right one of each, then others in order."""
    rewards = source.verifier.verify(source.prompts, source.population)
    by_prompt: dict[int, list[list[int]]] = {}
    for i, (prompt, correct) in enumerate(
        zip(source.population.prompt_uid.tolist(), rewards.correct.tolist(), strict=True)
    ):
        by_prompt.setdefault(prompt, [[], []])[int(correct)].append(i)
    mixed = [pair for pair in by_prompt.values() if pair[0] and pair[1]]
    order = [i for wrong, right in mixed for i in (wrong[0], right[0])]
    order += [i for i in range(len(source.population)) if i not in order]
    return torch.tensor(order[:rows], dtype=torch.int64)


def _truth(source: _Source, trajectories: Trajectories, samples: int) -> Truth | None:
    if not samples or not has_oracle(source.prompts):
        return None
    stream = Stream(source.replay.experiment.run.seed, "side_by_side", source.iteration)
    return true_values(source.policy, source.verifier, source.prompts, trajectories, source.sampling(), samples, stream)


def _samples_rollouts(node: Node) -> bool:
    return bool(node.outputs_of(Trajectories)) and "policy" in node.wires


def _column(name: str, experiment: Experiment, source: _Source, chosen: torch.Tensor, known: Truth | None) -> Column:
    try:
        trajectories, credit, note = _credit(experiment, source)
        rows = trajectories.index_of(source.population.uid[chosen])
        made = effective_credit(trajectories, credit, learner_of(experiment.graph).config.objective)
    except (CreditgraphError, NodeFailure) as error:
        return Column(name, f"no credit: {error}")
    column = Column(name, note, made.credit.select(rows), credit.mask.select(rows))
    if known is not None and column.credit is not None and column.mask is not None:
        judged = per_thought(column.credit, column.mask, trajectories.inherited[rows], known)
        column.pearson = pearson(judged.credit, judged.truth)
    return column


def _credit(experiment: Experiment, source: _Source) -> tuple[Trajectories, Credit, str]:
    """What the recipe's learner would read, with the run's rollouts and handles in place of the recipe's own."""
    graph, learner = experiment.graph, learner_of(experiment.graph)
    outputs = _given(experiment, source)
    sampled = 0.0
    runners: list[NodeRunner] = []

    def value(wire: Wire) -> Any:
        nonlocal sampled
        if wire.delay:
            raise ConfigError(f"{wire} is of an earlier iteration, which these rollouts do not have.")
        if (wire.source, wire.output) not in outputs:
            node = graph[wire.source]
            inputs = {socket: [value(w) for w in wires] for socket, wires in node.wires.items()}
            context = Context(
                node=node.name,
                node_index=graph.names.index(node.name),
                seed=experiment.run.seed,
                iterations=experiment.run.iterations,
                model=source.replay.experiment.model,
                data=source.replay.experiment.data,
            )
            runner = NodeRunner(node, context)
            runners.append(runner)
            runner.setup()
            made = runner.run(source.iteration, as_inputs(node, inputs))
            outputs.update({(node.name, k): v for k, v in made.items()})
            sampled += sum(
                v for k, v in runner.harvest().metrics.items() if k.endswith(("generated_tokens", "sampled_tokens"))
            )
        return outputs[wire.source, wire.output]

    try:
        trajectories, credit = (value(learner.wires[socket][0]) for socket in ("trajectories", "credit"))
    finally:
        for runner in runners:
            runner.close()
    return trajectories, credit, f"needed further sampling: {int(sampled):,} tokens" if sampled else ""


def _given(experiment: Experiment, source: _Source) -> dict[tuple[str, str], Any]:
    """(node, output) → what stands in for it; raises ConfigError when the recipe needs rollouts that the run does not
    have."""
    graph = experiment.graph
    samplers = [n for n in graph.nodes if _samples_rollouts(n)]
    own = {n.use: n for n in source.replay.graph.nodes if _samples_rollouts(n)}
    same = {n.use for n in samplers} == set(own)
    if not same and not (len(samplers) == 1 and samplers[0].use in PLAIN):
        missing = ", ".join(n.use for n in samplers if n.use not in own) or ", ".join(n.use for n in samplers)
        raise ConfigError(f"it needs further sampling: rollouts of its own ({missing}), which this run does not have.")
    found: dict[tuple[str, str], Any] = {}
    for node in graph.nodes:
        for output, socket in node.sockets.outputs.items():
            for kind, stand_in in ((Policy, source.policy), (Verifier, source.verifier), (Prompts, source.prompts)):
                if socket.carries(kind):
                    found[node.name, output] = stand_in
            if node in samplers and socket.carries(Trajectories):
                if same:
                    found[node.name, output] = source.replay.value(Wire(own[node.use].name, output), source.iteration)
                else:
                    found[node.name, output] = set_origin(source.population.replace(), f"{node.name}.{output}")
    return found
