"""Advantages and objectives of this project, and of plug-ins, as targets."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditgraph.components.learner.objective import LossInputs as Inputs
from creditgraph.components.learner.objective import Meters, ObjectiveSettings, aggregate, counts, loss_terms, prepare
from creditgraph.pipeline.app.audit.batch import Batch, Bools, Floats, Ints
from creditgraph.pipeline.app.audit.declared import declared_of
from creditgraph.pipeline.app.audit.loss_target import LossInputs, LossTarget
from creditgraph.pipeline.app.audit.targets import AdvantageTarget, AuditError
from creditgraph.pipeline.core.component import Component, Context
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Prompts, Rewards, Trajectories, Turns
from creditgraph.pipeline.core.settings import SettingsError, build_config
from creditgraph.pipeline.core.sockets import sockets_of

MADE = (Trajectories, Rewards, Prompts, Turns)
"""payloads that a batch of the audit gives, one of each"""
LATE = 1_000_000
"""the iteration that is audited: after warm-ups and first stages"""


def component_target(cls: type[Component], name: str, settings: Mapping[str, Any]) -> AdvantageTarget:
    """An advantage node whose inputs are trajectories, rewards, prompts and turns; with turns, a row is a turn.

    Raises AuditError for another component, with the inputs that it lacks.
    """
    sockets = sockets_of(cls)  # type: ignore[arg-type]
    if not any(socket.carries(Credit) for socket in sockets.outputs.values()):
        raise AuditError(f"{name}: returns no credit; expected an advantage node, or a recipe.")
    made: dict[type, str] = {}
    needed = []
    for socket_name, socket in sockets.inputs.items():
        kind = next((k for k in MADE if k in socket.types and k not in made), None)
        if kind is not None and socket.required:
            made[kind] = socket_name
        elif socket.required:
            needed.append(socket_name)
    if needed:
        raise AuditError(
            f"{name}: needs {', '.join(needed)}, which depend on a model and cannot be made up here. Audit what it "
            "recorded in a run (creditgraph audit RUN), or judge it with creditgraph creditbench."
        )
    config, problems = build_config(cls.Config, dict(settings), name)
    if problems:
        raise SettingsError(problems)

    def advantage(batch: Batch, turns: Turns | None = None) -> Jagged:
        node = cls(config)
        node.setup(Context(node="audited", node_index=1, seed=0, iteration=LATE, iterations=LATE + 1))
        values: dict[type, Any] = {Trajectories: trajectories_of(batch), Rewards: rewards_of(batch), Turns: turns}
        values[Prompts] = prompts_of(batch)
        outputs = node.run(**{socket_name: values[kind] for kind, socket_name in made.items()})
        credit = next(v for v in vars(outputs).values() if isinstance(v, Credit))
        return credit.advantage.with_values(torch.where(credit.mask.values, credit.advantage.values, 0.0))

    def call(batch: Batch) -> Floats:
        if Turns not in made:
            return padded(advantage(batch), batch.width)
        rows, turns, row, inside = turn_rows(batch)
        out = np.zeros(batch.turns.shape)
        turn, place = inside.nonzero()
        out[row[turn], place] = advantage(rows, turns).values.numpy()
        return out

    # Without settings: many act on rows with a parent or on other payloads, which a batch of the audit does not have.
    return AdvantageTarget(
        name=name,
        call=call,
        reads=frozenset({"rewards", "groups", "valid", *(("turns", "turn_rewards") if Turns in made else ())}),
        declares=declared_of(cls(config)),
    )


def unmade(name: str) -> AdvantageTarget:
    """The target of a node whose inputs the audit cannot make, for a check that says so."""

    def call(batch: Batch) -> Floats:
        raise AuditError(f"{name}: its inputs cannot be made up.")

    return AdvantageTarget(name=name, call=call, reads=frozenset())


def objective_target(objective: ObjectiveSettings, name: str) -> LossTarget:
    """The loss of a learner, over the whole batch as one optimiser step."""

    def call(inputs: LossInputs, logprobs: Tensor) -> Tensor:
        batch = inputs.batch
        # Observations are no response tokens of ours: a row has only those that the policy chose.
        mask = torch.from_numpy(batch.mask)
        sizes = mask.sum(1)

        def jagged(values: Any) -> Jagged:
            tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
            return Jagged.from_lengths(tensor[mask], sizes)

        old = jagged(inputs.old_logprobs)
        rows = Inputs(
            logprobs=old,
            old_logprobs=old,
            engine_logprobs=old,
            advantage=jagged(inputs.advantages),
            mask=old.with_values(torch.ones(len(old.values), dtype=torch.bool)),
            group=torch.from_numpy(batch.groups),
            old_entropies=old.with_values(torch.full_like(old.values, 0.5)),
            reference_logprobs=jagged(inputs.reference_logprobs),
        )
        meters = Meters()
        rows = prepare(rows, objective, meters)
        rows = rows.replace(logprobs=jagged(logprobs), entropies=rows.old_entropies)
        return aggregate(loss_terms(rows, objective, meters), rows.mask, objective, counts(rows.mask.sum()))

    reads = {"logprobs", "old_logprobs", "advantages", "mask", "groups"}
    return LossTarget(
        name=name,
        call=call,
        settings=vars(objective.config),
        reads=frozenset(reads | ({"reference_logprobs"} if objective.kl.coefficient else set())),
        declares=declared_of(objective.build()),
    )


def trajectories_of(batch: Batch) -> Trajectories:
    """Rows of token 1 with a thought per turn; the group of each is its prompt."""
    sizes = torch.from_numpy(batch.lengths)
    count = len(batch)
    values = torch.ones(int(sizes.sum()), dtype=torch.int32)
    tokens = Jagged.from_lengths(values, sizes)
    ends = [
        [t + 1 for t in range(n) if t + 1 == n or row[t + 1] != row[t]]
        for row, n in zip(batch.turns, batch.lengths, strict=True)
    ]
    return Trajectories(
        uid=torch.arange(1000, 1000 + count),
        prompt_uid=torch.from_numpy(batch.groups),
        group=torch.from_numpy(batch.groups),
        parent=torch.full((count,), -1),
        prompt_tokens=Jagged.from_lengths(torch.ones(count, dtype=torch.int32), torch.ones(count, dtype=torch.int64)),
        response_tokens=tokens,
        inherited=torch.zeros(count, dtype=torch.int64),
        engine_logprobs=tokens.with_values(torch.full((len(values),), -0.7)),
        entropies=tokens.with_values(torch.full((len(values),), 0.5)),
        thought_ends=Jagged.from_rows(ends, torch.int32),
        policy_version=torch.zeros(count, dtype=torch.int64),
        finish_reason=["length" if cut else "eos" for cut in batch.truncated],
        text=[""] * count,
    )


def turn_rows(batch: Batch) -> tuple[Batch, Turns, Ints, Bools]:
    """A row for each turn, with the return of its episode as outcome; an episode's first state alone is known.

    Returns the rows [M], their turns, the row of the batch that each is of [M], and its tokens there, bool [M, T].
    """
    found = [(i, t) for i, own in enumerate(batch.turns) for t in np.unique(own[own >= 0])]
    row, turn = np.array(found, dtype=np.int64).reshape(-1, 2).T
    inside = batch.turns[row] == turn[:, None]
    lengths = inside.sum(1)
    first, last = np.diff(row, prepend=-1) != 0, np.diff(row, append=-1) != 0
    rows = batch.rows(row).with_(
        rewards=(batch.rewards + batch.turn_rewards.sum(1))[row],
        lengths=lengths,
        turns=np.where(np.arange(batch.width) < lengths[:, None], 0, -1),
    )
    start = np.maximum.accumulate(np.where(first, np.arange(len(row)), 0))
    turns = Turns(
        uid=torch.arange(1000, 1000 + len(row)),
        episode=torch.from_numpy(1000 + start),
        turn=torch.from_numpy(np.arange(len(row)) - start),
        state=["start" if begins else "" for begins in first],
        reward=torch.from_numpy(batch.turn_rewards[row, turn] + np.where(last, batch.rewards[row], 0.0)).float(),
        done=torch.from_numpy(last),
        fault=[""] * len(row),
    )
    return rows, turns, row, inside


def rewards_of(batch: Batch) -> Rewards:
    """The rewards of `trajectories_of`."""
    value = torch.from_numpy(batch.rewards).float()
    return Rewards(
        uid=torch.arange(1000, 1000 + len(batch)),
        value=value,
        correct=value >= 1,
        valid=torch.from_numpy(batch.valid),
        detail=[""] * len(batch),
    )


def prompts_of(batch: Batch) -> Prompts:
    """The prompts of `trajectories_of`."""
    uid = torch.unique(torch.from_numpy(batch.groups))
    count = len(uid)
    return Prompts(
        uid=uid,
        tokens=Jagged.from_lengths(torch.ones(count, dtype=torch.int32), torch.ones(count, dtype=torch.int64)),
        text=["p"] * count,
        answer=["1"] * count,
        metadata=[{}] * count,
    )


def padded(values: Jagged, width: int) -> Floats:
    """float64 [N, width], 0 beyond each row."""
    out = np.zeros((len(values), width))
    for row, own in enumerate(values.rows()):
        out[row, : len(own)] = own.double().numpy()
    return out
