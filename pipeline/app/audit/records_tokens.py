"""Checks of recorded log-probs, token ids and roles: faults of the way from the engine to the learner.

The engine's log-probs are those at which tokens were sampled; the trainer computes them again. Over equal weights both
are the same up to rounding, so a systematic difference is a fault of alignment, of the temperature or of the prompt.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np

from creditgraph.pipeline.app.audit.batch import Bools, Floats
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed, skipped
from creditgraph.pipeline.app.audit.records import LOGPROBS, Records
from creditgraph.pipeline.app.audit.records_credit import CREDIT

CLOSE = 0.1  # nats, median: what another kernel, or a policy a few steps old, makes of a log-prob
FEW = 8  # tokens below which nothing is judged
TRAINED_ROLES = ("assistant", "model", "policy", "gpt", "1", "True")


def _pair(records: Records) -> tuple[str, Floats, str, Floats] | None:
    """The trainer's and the engine's log-probs with their names; the newest of the trainer's that are there."""
    engine = records.logprobs.get("rollout_logprob")
    name = next((kind for kind in ("old_logprob", "logprob") if kind in records.logprobs), "")
    return None if engine is None or not name else (name, records.logprobs[name], "rollout_logprob", engine)


def _median(gap: Floats, where: Bools) -> float:
    held = np.abs(gap[where & np.isfinite(gap)])
    return float(np.median(held)) if held.size else float("inf")


def numbers(records: Records) -> Finding:
    """Log-probs are at most 0."""
    if not records.logprobs:
        return skipped(f"has none of the columns {', '.join(LOGPROBS)}")
    for kind, values in records.logprobs.items():
        own = values[records.mask]
        high, bad = int((own > 1e-3).sum()), int(np.isinf(own).sum())
        if high or bad:
            likely = "a sign is turned round, or these are probabilities or logits, not log-probs" if high else ""
            row = int(((values > 1e-3) | np.isinf(values)).any(1).nonzero()[0][0])
            return Finding(
                verdict="fail",
                message=f"{high} of {own.size} trained tokens have a {kind} above 0, {bad} an infinite one",
                likely=likely,
                example={"row": row, kind: _shown(values[row])},
                size=high + bad,
            )
    return passed(", ".join(records.logprobs))


def alignment(records: Records) -> Finding:
    """The trainer's log-prob of a token against the engine's of the same and of its neighbours."""
    pair = _pair(records)
    if pair is None:
        return skipped("needs rollout_logprob, and old_logprob or logprob")
    name, ours, other, engine = pair
    inner = records.mask[:, 1:] & records.mask[:, :-1]
    if inner.sum() < FEW:
        return skipped("has too few trained tokens")
    same = _median((ours - engine), records.mask)
    early, late = _median(ours[:, 1:] - engine[:, :-1], inner), _median(ours[:, :-1] - engine[:, 1:], inner)
    if same <= CLOSE or min(early, late) > same / 4:
        return _of_other_rows(records, same) or passed(f"median difference {same:.2g} nats")
    which = "previous" if early < late else "next"
    likely = f"{name} is shifted by one token against {other}: each is that of the {which} token"
    return _shown_pair(
        records, pair, likely, f"median difference {same:.2g} nats, {min(early, late):.2g} when shifted", same
    )


def _of_other_rows(records: Records, same: float) -> Finding | None:
    """A failure where each row's log-probs are those of another row."""
    pair = _pair(records)
    assert pair is not None
    name, ours, _, engine = pair
    if same <= CLOSE:
        return None
    swapped = 0
    for i in range(len(ours)):
        gaps = [
            _median((ours[i] - engine[j])[None], (records.mask[i] & records.mask[j])[None]) for j in range(len(ours))
        ]
        swapped += int(np.argmin(gaps) != i and min(gaps) < gaps[i] / 4)
    if swapped < len(ours) / 2:
        return None
    likely = f"{name} of a row is that of another row: the two are in different orders"
    return _shown_pair(records, pair, likely, f"{swapped} of {len(ours)} rows agree with another row", same)


def temperature(records: Records) -> Finding:
    """The slope of the trainer's log-probs over the engine's: at another temperature it is not 1."""
    pair = _pair(records)
    if pair is None:
        return skipped("needs rollout_logprob, and old_logprob or logprob")
    name, ours, other, engine = pair
    where = records.mask & np.isfinite(ours) & np.isfinite(engine)
    a, b = ours[where], engine[where]
    if a.size < FEW or np.std(b) < 0.05 or np.std(a) < 0.05:
        return skipped("has too few tokens, or log-probs that hardly differ")
    together = float(np.corrcoef(a, b)[0, 1])
    slope = float(np.std(a) / np.std(b))
    gap = float(np.abs(a - b).mean())
    if together < 0.9 or gap < CLOSE / 2 or 0.93 < slope < 1.07:
        return passed(f"slope {slope:.3g}, correlation {together:.3g}")
    likely = (
        f"{name} and {other} are at different temperatures: {name} varies {slope:.3g} times as much, as at a "
        f"temperature {'below' if slope > 1 else 'above'} that of the engine (about {1 / slope:.2g} times it)"
    )
    return _shown_pair(records, pair, likely, f"slope {slope:.3g}, mean difference {gap:.2g} nats", abs(slope - 1))


def first_tokens(records: Records) -> Finding:
    """Tokens at which the policy begins to speak: they show a prompt that ends otherwise."""
    pair = _pair(records)
    if pair is None:
        return skipped("needs rollout_logprob, and old_logprob or logprob")
    _, ours, _, engine = pair
    before = np.concatenate([np.zeros((len(ours), 1), dtype=bool), records.mask[:, :-1]], axis=1)
    first = records.mask & ~before
    rest = records.mask & before
    if rest.sum() < FEW or first.sum() < 2:
        return skipped("has too few trained tokens")
    begin, inner = _median(ours - engine, first), _median(ours - engine, rest)
    numbers_ = f"median difference {begin:.2g} nats at first tokens, {inner:.2g} after them"
    if begin < 0.3 or begin < 5 * inner:
        return passed(numbers_)
    likely = (
        "the trainer's prompt ends otherwise than the engine's: a chat template, a generation prompt, a BOS token or a "
        "token that is dropped at the border"
    )
    return _shown_pair(records, pair, likely, numbers_, begin)


def sampled(records: Records) -> Finding:
    """Trained tokens that the engine did not sample, or that are of another role."""
    roles = records.columns.get("role")
    engine = records.logprobs.get("rollout_logprob")
    if roles is None and engine is None:
        return skipped("needs roles of tokens, or rollout_logprob")
    likely = "tokens of a tool or of the environment are trained: the loss mask covers what the policy did not write"
    if roles is not None:
        wrong: dict[str, int] = defaultdict(int)
        for row, own in enumerate(roles):
            for role in [str(x) for x, trained in zip(own, records.mask[row], strict=False) if trained]:
                wrong[role] += role not in TRAINED_ROLES
        told = {role: count for role, count in wrong.items() if count}
        if told:
            message = ", ".join(f"{count} trained tokens have the role {role}" for role, count in told.items())
            return Finding(verdict="fail", message=message, likely=likely, example=told, size=sum(told.values()))
        return passed("all trained tokens are of the policy")
    assert engine is not None
    ours = next((records.logprobs[kind] for kind in ("old_logprob", "logprob") if kind in records.logprobs), None)
    # An engine returns no number, or exactly 0, for a token that it was given.
    given: Bools = np.isnan(engine)
    if ours is not None:
        given = given | ((engine == 0) & (ours < -0.5))
    silent: Bools = records.mask & given
    if not silent.any():
        return passed("each trained token has a log-prob of the engine")
    row = int(np.flatnonzero(silent.any(axis=1))[0])
    return Finding(
        verdict="fail",
        message=f"{int(silent.sum())} trained tokens of {int(silent.any(1).sum())} rows have no log-prob of the engine",
        likely=likely,
        example={"row": row, "tokens": silent[row].nonzero()[0].tolist(), "rollout_logprob": _shown(engine[row])},
        size=float(silent.sum()),
    )


def prefixes(records: Records) -> Finding:
    """Rows of one trajectory: the prompt of a turn begins with the prompt and the response before it."""
    wanted = ("trajectory", "prompt_ids", "response_ids")
    if any(column not in records.columns for column in wanted):
        return skipped(f"needs {', '.join(wanted)}, a row per turn")
    rows: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(records.columns["trajectory"]):
        rows[str(name)].append(i)
    prompts, responses = records.columns["prompt_ids"], records.columns["response_ids"]
    bad, pairs = 0, 0
    example: dict[str, Any] = {}
    for name, own in rows.items():
        for earlier, later in itertools.pairwise(own):
            before, now = [*prompts[earlier], *responses[earlier]], list(prompts[later])
            pairs += 1
            if now[: len(before)] == before:
                continue
            bad += 1
            place = next((k for k, (x, y) in enumerate(zip(before, now, strict=False)) if x != y), len(now))
            example = example or {
                "trajectory": name,
                "rows": [earlier, later],
                "first difference at token": place,
                "of": "the response" if place >= len(prompts[earlier]) else "the prompt",
                "before": before[max(place - 2, 0) : place + 4],
                "now": now[max(place - 2, 0) : place + 4],
            }
    if not pairs:
        return skipped("no trajectory has two rows")
    if not bad:
        return passed(f"{pairs} pairs of turns")
    return Finding(
        verdict="fail",
        message=f"in {bad} of {pairs} turns the prompt does not begin with the prompt and response of the turn before",
        likely="the chat template drops or rewrites earlier turns (thoughts, tool calls), or text was tokenised again: "
        "what is trained is not what was sampled",
        example=example,
        size=bad / pairs,
    )


def _shown(values: Floats) -> list[Any]:
    return [None if not np.isfinite(x) else round(float(x), 3) for x in values[:12]]


def _shown_pair(
    records: Records, pair: tuple[str, Floats, str, Floats], likely: str, message: str, size: float
) -> Finding:
    name, ours, other, engine = pair
    row = int(np.argmax(np.where(records.mask, np.abs(np.nan_to_num(ours - engine)), 0.0).mean(1)))
    example = {"row": row, name: _shown(ours[row]), other: _shown(engine[row])}
    return Finding(verdict="fail", message=message, likely=likely, example=example, size=size)


RECORDS = (
    *CREDIT,
    *(
        Check(name=name, layer="records", title=title, run=run)
        for name, title, run in (
            ("records_logprobs", "Log-probs are numbers of at most 0.", numbers),
            ("records_alignment", "The trainer's and the engine's log-probs are of the same tokens.", alignment),
            ("records_temperature", "Both log-probs are at one temperature.", temperature),
            ("records_first_tokens", "Where the policy begins to speak, both agree as elsewhere.", first_tokens),
            ("records_sampled", "Only tokens that the policy wrote are trained.", sampled),
            ("records_prefixes", "A turn's prompt begins with the turn before it.", prefixes),
        )
    ),
)
