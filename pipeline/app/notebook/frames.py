"""Rollouts as rows of a table, from the payloads of an iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from creditgraph.pipeline.core.errors import extra
from creditgraph.pipeline.core.payloads import Batch, Credit, Prompts, Rewards, Trajectories

COLUMNS = (
    "iteration",
    "node",
    "prompt",
    "response",
    "answer",
    "reward",
    "correct",
    "credit",
    "tokens",
    "uid",
    "group",
    "parent",
)
Where = dict[int, tuple[Any, int]]  # uid → (batch, row)


def rollout_rows(
    outputs: Mapping[str, Batch], iteration: int, learned: Sequence[str], pieces: Callable[[Sequence[int]], list[str]]
) -> list[list[Any]]:
    """A list of `COLUMNS` per rollout, under the node that sampled it; what is not among the outputs is None or NaN.

    Args:
        outputs: "node.output" → batch, in the order of the graph.
        iteration: number of the iteration.
        learned: outputs whose credit a learner reads, which has the last word where several nodes give credit.
        pieces: token ids → one string per token.
    """
    prompts = _by_uid(outputs, Prompts)
    rewards = _by_uid(outputs, Rewards)
    credit = _by_uid(dict(sorted(outputs.items(), key=lambda item: item[0] in learned)), Credit)
    rows: dict[int, list[Any]] = {}
    for name, batch in outputs.items():
        if not isinstance(batch, Trajectories):
            continue
        for i, uid in enumerate(batch.uid.tolist()):
            if uid in rows:
                continue
            problem, p = prompts.get(int(batch.prompt_uid[i]), (None, 0))
            reward, r = rewards.get(uid, (None, 0))
            credited, c = credit.get(uid, (None, 0))
            judged = reward is not None and bool(reward.valid[r])
            rows[uid] = [
                iteration,
                name.partition(".")[0],
                problem.text[p] if problem is not None else None,
                batch.text[i],
                problem.answer[p] if problem is not None else None,
                float(reward.value[r]) if judged else math.nan,
                bool(reward.correct[r]) if judged else None,
                credited.advantage.row(c).tolist() if credited is not None else None,
                pieces(batch.response_tokens.row(i).tolist()),
                uid,
                int(batch.group[i]),
                int(batch.parent[i]),
            ]
    return list(rows.values())


def _by_uid(outputs: Mapping[str, Batch], kind: type[Batch]) -> Where:
    batches = [batch for batch in outputs.values() if isinstance(batch, kind)]
    return {uid: (batch, i) for batch in batches for i, uid in enumerate(batch.uid.tolist())}


def frame(rows: Sequence[Sequence[Any]], columns: Sequence[str], what: str) -> Any:
    """A DataFrame; MissingExtraError, which names what to install, where there is no pandas."""
    with extra("train", what):
        import pandas

    return pandas.DataFrame([list(row) for row in rows], columns=list(columns))
