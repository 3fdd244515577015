"""The logic of `creditgraph credit`: the credit of several recipes for rollouts that a run has recorded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from creditgraph.components.rollouts.thoughts import has_oracle
from creditgraph.pipeline.app.credit.sessions import (
    CreditRun,
    NoPolicy,
    RecordedVerdicts,
    learner_of,
    samples_rollouts,
    sampling_of,
)
from creditgraph.pipeline.app.credit.thought_credit import effective_credit, own_tokens, pearson, per_thought
from creditgraph.pipeline.app.credit.truth import Truth, sampled_values, thought_ends, true_values, truth_of_values
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, MissingExtraError, RunError
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Prompts, Rewards, Segments, SegmentValues, Trajectories, Turns
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.core.streams import Stream
from creditgraph.pipeline.run.compose.experiment import Experiment, build_experiment, compose
from creditgraph.pipeline.run.node_runner import NodeFailure, set_origin
from creditgraph.pipeline.run.recording import recorded_iterations
from creditgraph.pipeline.run.replay import Replay

# Samplers whose responses are independent of each other, so that any responses may replace theirs.
PLAIN = ("sampler.chains", "sampler.dynamic", "sampler.failures")
EPISODES = "sampler.environment"
TRUTH = "true advantage"


@dataclass
class Column:
    """One method's credit for the chosen rollouts.

    Attributes:
        name: recipe.
        note: further sampling, approximations, or the reason why there is no credit.
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
        prompts, trajectories: what was compared; `trajectories` are the chosen rows.
        ends: Jagged int32, thought ends.
        reward: outcome per row.
        columns: one per recipe, then the truth where there is one.
        error: 1-based first wrong thought per row, 0 where there is none or the task cannot tell.
        model: folder or hub name of the model, whose tokenizer turns tokens into text.
        notes: sentences about the run.
    """

    iteration: int
    prompts: Prompts
    trajectories: Trajectories
    ends: Jagged
    reward: list[float]
    columns: list[Column]
    error: list[int]
    model: str
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
    """The credit that each recipe gives to recorded rollouts.

    Args:
        path: run directory with recorded prompts and trajectories.
        recipes: names.
        overrides: further settings for every recipe.
        config_dirs: further folders with recipes.
        iteration: a recorded one; None means the newest one whose policy the run can restore exactly.
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
    wire = learner_of(replay.graph).wires["trajectories"][0]
    iteration = _iteration(replay, wire) if iteration is None else iteration
    source = _Source(replay, iteration, replay.value(wire, iteration))
    sampled = sampled_values(replay.path, iteration)
    chosen = _choose(source, rows, sampled)
    trajectories = source.population.select(chosen)
    truth = _truth(source, trajectories, samples)
    if truth is None and sampled is not None:
        verdicts = source.verifier.verify(source.prompts, trajectories)
        segments, values = sampled
        at = segments.index_of(trajectories.uid)
        truth = truth_of_values(segments.select(at), values.select(at), verdicts)
    columns = _recorded(source, chosen, truth) if source.imported else []
    columns += [_column(name, experiment, source, chosen, truth) for name, experiment in experiments.items()]
    if truth is not None:
        columns.append(_true_column(truth, trajectories, samples))
    elif samples and source.policy is not None:
        turns = "turns are not sampled here (`creditgraph creditbench --suite turns` does)"
        why = turns if source.turns else "the task does not know its steps"
        replay.notes.append(f"{why}, so no true advantage is shown")
    return Comparison(
        iteration=iteration,
        prompts=source.prompts,
        trajectories=trajectories,
        ends=thought_ends(trajectories, source.policy) if truth is None else truth.ends,
        reward=source.verifier.verify(source.prompts, trajectories).value.tolist(),
        columns=columns,
        error=truth.error.tolist() if truth is not None else [0] * len(trajectories),
        model=replay.experiment.model.path,
        notes=list(dict.fromkeys(replay.notes)),
    )


class _Source:
    """Rollouts, prompts, policy and verifier of one iteration of the run."""

    def __init__(self, replay: Replay, iteration: int, population: Trajectories) -> None:
        self.replay = replay
        self.iteration = iteration
        self.population = population
        self.prompts: Prompts = self._first(Prompts)
        self.policy: Policy | None = self._first(Policy, needed=False)
        # An environment rewards its episodes itself.
        verifies = bool(replay.graph.outputs_of(Verifier))
        self.verifier: Verifier = self._first(Verifier) if verifies else RecordedVerdicts(self._first(Rewards))
        own = {node.use: node for node in replay.graph.nodes if samples_rollouts(node)}
        self.imported = not own
        self.samplers: dict[str, Node] = own or _imported(self)
        """`use` of each node that samples rollouts → the node; imported turns are those of a sampler of episodes"""
        self.turns = any(node.outputs_of(Turns) for node in self.samplers.values())
        """whether a row is a turn"""

    def _first(self, kind: type, needed: bool = True) -> Any:
        for wire in self.replay.graph.outputs_of(kind):
            try:
                return self.replay.value(wire, self.iteration)
            except MissingExtraError as error:
                if needed:
                    raise
                self.replay.notes.append(f"token ids instead of texts, and no true advantage: {error}")
                return None
        if not needed:
            self.replay.notes.append(
                "this run has no policy, so a true advantage is shown only where `creditgraph values` sampled it"
            )
            return None
        raise ConfigError(
            f"{self.replay.path}: its graph has no {kind.__name__}; expected a run that samples and verifies."
        )


def _iteration(replay: Replay, wire: Wire) -> int:
    recorded = recorded_iterations(replay.path, f"{wire.source}.{wire.output}")
    if not recorded:
        raise RunError(
            f"{replay.path}: {wire} is not recorded, so there are no rollouts; train with run.record.every=1 and "
            "run.record.outputs=all."
        )
    saved = replay.checkpoints()
    exact = [i for i in recorded if i == 0 or i - 1 in saved]
    return exact[-1] if exact else recorded[-1]


def _choose(source: _Source, rows: int, sampled: tuple[Segments, SegmentValues] | None) -> torch.Tensor:
    """Rows to show, int64; where values were sampled for some, only these."""
    rewards = source.verifier.verify(source.prompts, source.population)
    if sampled is None:
        return mixed_first(source.population, rewards.correct, rows)
    order = mixed_first(source.population, rewards.correct, len(source.population))
    return order[torch.isin(source.population.uid[order], sampled[0].uid)][:rows]


def mixed_first(population: Trajectories, correct: torch.Tensor, rows: int) -> torch.Tensor:
    """At most `rows` rows, int64: first a wrong and a right one of each prompt that has both, then others in order."""
    by_prompt: dict[int, list[list[int]]] = {}
    for i, (prompt, right) in enumerate(zip(population.prompt_uid.tolist(), correct.tolist(), strict=True)):
        by_prompt.setdefault(prompt, [[], []])[int(right)].append(i)
    mixed = [pair for pair in by_prompt.values() if pair[0] and pair[1]]
    order = [i for wrong, right in mixed for i in (wrong[0], right[0])]
    order += [i for i in range(len(population)) if i not in order]
    return torch.tensor(order[:rows], dtype=torch.int64)


def _truth(source: _Source, trajectories: Trajectories, samples: int) -> Truth | None:
    if not samples or source.policy is None or source.turns or not has_oracle(source.prompts):
        return None
    stream = Stream(source.replay.experiment.run.seed, "side_by_side", source.iteration)
    sampling = sampling_of(source.replay.graph)
    return true_values(source.policy, source.verifier, source.prompts, trajectories, sampling, samples, stream)


def _recorded(source: _Source, chosen: torch.Tensor, truth: Truth | None) -> list[Column]:
    """The credit that the run recorded, of each node that its learner reads it from."""
    columns = []
    for wire in learner_of(source.replay.graph).wires["credit"]:
        if source.iteration in recorded_iterations(source.replay.path, f"{wire.source}.{wire.output}"):
            credit: Credit = source.replay.value(wire, source.iteration)
            credit = credit.select(credit.index_of(source.population.uid[chosen]))
            advantage = torch.where(credit.mask.values, credit.advantage.values.double(), 0.0)
            inherited = source.population.inherited[chosen]
            values = credit.advantage.with_values(advantage)
            columns.append(_measured(Column(f"recorded {wire}", "", values, credit.mask), inherited, truth))
    return columns


def _measured(column: Column, inherited: torch.Tensor, truth: Truth | None) -> Column:
    """The column with its correlation with the truth."""
    if truth is not None and column.credit is not None and column.mask is not None:
        own = own_tokens(column.credit, column.mask, inherited, truth)
        means, kept = per_thought(column.credit, own, truth)
        column.pearson = pearson(means, truth.advantage.values[kept].numpy())
    return column


def _true_column(truth: Truth, trajectories: Trajectories, samples: int) -> Column:
    note = f"{samples} continuations per thought; {truth.sampled_tokens:,} tokens sampled for it"
    if not truth.sampled_tokens:
        note = f"from the values that `creditgraph values` sampled{truth.precision}"
    credit = truth.per_token(trajectories.response_tokens)
    return Column(TRUTH, note, credit, credit.with_values(torch.ones(len(credit.values), dtype=torch.bool)))


def _column(name: str, experiment: Experiment, source: _Source, chosen: torch.Tensor, truth: Truth | None) -> Column:
    try:
        trajectories, credit, note = _credit(experiment, source)
        rows = trajectories.index_of(source.population.uid[chosen])
        effective = effective_credit(trajectories, credit, learner_of(experiment.graph).config.objective)
    except (CreditgraphError, NodeFailure) as error:
        return Column(name, f"no credit: {error}")
    column = Column(name, note, effective.credit.select(rows), credit.mask.select(rows))
    return _measured(column, trajectories.inherited[rows], truth)


def _credit(experiment: Experiment, source: _Source) -> tuple[Trajectories, Credit, str]:
    """The inputs of the recipe's learner, with rollouts, policy and verifier of the run."""
    run = source.replay.experiment
    settings = dataclasses.replace(experiment.run, device=run.run.device)
    experiment = dataclasses.replace(experiment, run=settings, model=run.model, data=run.data)
    shared = _shared(experiment, source)
    with CreditRun(experiment, experiment.run.seed, iteration=source.iteration, shared=shared) as credited:
        sampled = credited.logged("sampled_tokens")
    return (
        credited.trajectories,
        credited.credit,
        f"needed further sampling: {int(sampled):,} tokens" if sampled else "",
    )


def _shared(experiment: Experiment, source: _Source) -> dict[str, dict[str, Any]]:
    """Node → outputs that come from the run; ConfigError when the recipe needs rollouts that the run does not have."""
    graph = experiment.graph
    samplers = [n for n in graph.nodes if samples_rollouts(n)]
    own = source.samplers
    same = {n.use for n in samplers} == set(own)
    if not same and not (len(samplers) == 1 and samplers[0].use in PLAIN and not source.turns):
        missing = [n.use for n in samplers if n.use not in own] or [n.use for n in samplers]
        raise ConfigError(
            f"it needs further sampling: rollouts of its own ({', '.join(missing)}), which this run does not have."
        )
    policy = source.policy or (None if source.replay.graph.outputs_of(Policy) else NoPolicy())
    handles = ((Policy, policy), (Verifier, source.verifier), (Prompts, source.prompts))
    shared: dict[str, dict[str, Any]] = {}
    for node in graph.nodes:
        for output, socket in node.sockets.outputs.items():
            values: list[Any] = [value for kind, value in handles if value is not None and socket.carries(kind)]
            if node in samplers and socket.carries(Turns) and same:
                values.append(source.replay.value(Wire(own[node.use].name, output), source.iteration))
            if node in samplers and socket.carries(Trajectories):
                values.append(_rollouts(node, output, own[node.use] if same else None, source))
            if values:
                shared.setdefault(node.name, {})[output] = values[-1]
    return shared


def _imported(source: _Source) -> dict[str, Node]:
    """Of a run whose rollouts are imported turns, the node that has them, as the sampler of episodes."""
    for wire in source.replay.graph.outputs_of(Turns):
        if source.iteration in recorded_iterations(source.replay.path, f"{wire.source}.{wire.output}"):
            return {EPISODES: source.replay.graph[wire.source]}
    return {}


def _rollouts(node: Node, output: str, own: Node | None, source: _Source) -> Trajectories:
    """The run's rollouts for a sampler of the recipe: those of the run's node `own`, or all of them."""
    if own is None:
        return cast(Trajectories, set_origin(source.population.replace(), f"{node.name}.{output}"))
    return cast(Trajectories, source.replay.value(Wire(own.name, output), source.iteration))
