"""Advantages that are known under a name: what is told of them, and which checks they fail by their definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from creditgraph.pipeline.app.audit.batch import Batch, Floats, make
from creditgraph.pipeline.app.audit.targets import AdvantageTarget

_WHOLE_BATCH = frozenset({"other_groups", "uneven_groups", "copies"})
# One word → the checks that such a design fails, for `--declare`.
WORDS: Mapping[str, frozenset[str]] = {
    "reinforce++": _WHOLE_BATCH | {"reward_shift", "no_signal", "records_baseline"},
    "batch_deviation": _WHOLE_BATCH | {"reward_shift"},
    "whitening": _WHOLE_BATCH,
    "maxrl": frozenset({"reward_shift", "monotone"}),
    "token_baseline": frozenset({"reward_shift"}),  # a token that no sibling reaches has no baseline
    "masked_rows_count": frozenset({"invalid_rows"}),  # the mask is of the loss, as with overlong responses
    "no_baseline": frozenset({"reward_shift", "no_signal", "records_baseline"}),
}


@dataclass(frozen=True)
class Design:
    """A known form of advantages.

    Attributes:
        words: what it is, as a phrase.
        of: its advantages, float64 [N], of rewards, groups and lengths.
        declare: the word of `WORDS` that declares what it fails, "" if it fails nothing.
    """

    words: str
    of: Callable[[Floats, Floats, Floats], Floats]
    declare: str = ""


def _by_group(form: Callable[[Floats, Floats], Floats]) -> Callable[[Floats, Floats, Floats], Floats]:
    def of(rewards: Floats, groups: Floats, lengths: Floats) -> Floats:
        out = np.zeros_like(rewards)
        for group in np.unique(groups):
            rows = groups == group
            out[rows] = form(rewards[rows], lengths[rows])
        return out

    return of


def _whitened(values: Floats, weights: Floats, less: int) -> Floats:
    mean = (weights * values).sum() / weights.sum()
    square = (weights * (values - mean) ** 2).sum() / (weights.sum() - less)
    out: Floats = (values - mean) / np.sqrt(square)
    return out


_centred = _by_group(lambda r, _: r - r.mean())


def _over_batch(less: int) -> Callable[[Floats, Floats, Floats], Floats]:
    return lambda r, g, n: _centred(r, g, n) / r.std(ddof=less)


def _spread_of_centred(less: int) -> Callable[[Floats, Floats, Floats], Floats]:
    return lambda r, g, n: _centred(r, g, n) / _centred(r, g, n).std(ddof=less)


# A scale that all rows share is told apart by none of them, so n and n − 1 over a batch are one form.
DESIGNS = (
    Design("reward minus the mean of its group", _centred),
    Design(
        "GRPO: minus the mean, over the deviation of the group (n)", _by_group(lambda r, _: (r - r.mean()) / r.std())
    ),
    Design(
        "GRPO: minus the mean, over the deviation of the group (n − 1)",
        _by_group(lambda r, _: (r - r.mean()) / r.std(ddof=1)),
    ),
    Design("RLOO: minus the mean of the others", _by_group(lambda r, _: (r - r.mean()) * len(r) / (len(r) - 1))),
    Design("OPO: minus the mean of the group, weighted by length", _by_group(lambda r, n: r - (n * r).sum() / n.sum())),
    Design(
        "MaxRL: minus the mean, over the mean of the group", _by_group(lambda r, _: (r - r.mean()) / r.mean()), "maxrl"
    ),
    Design("minus the mean of the group, over a deviation of the batch", _over_batch(0), "batch_deviation"),
    Design(
        "minus the mean of the group, over the deviation of these in the batch",
        _spread_of_centred(0),
        "batch_deviation",
    ),
    Design(
        "REINFORCE++ with the baseline of the group, whitened over the tokens of the batch",
        lambda r, g, n: _whitened(_centred(r, g, n), n, 0),
        "batch_deviation",
    ),
    Design("REINFORCE++: whitened over the tokens of the batch", lambda r, g, n: _whitened(r, n, 0), "reinforce++"),
    Design(
        "REINFORCE++: whitened over the rows of the batch", lambda r, g, n: _whitened(r, n * 0 + 1, 0), "reinforce++"
    ),
    Design("the rewards themselves: no baseline is subtracted", lambda r, g, n: r, "no_baseline"),
)

# Groups of 3 and 5 rows tell n from n − 1, which over a batch, of 20 tokens in both, are one scale; a function that
# takes groups of one size is given two of 4.
UNEVEN, EVEN = (
    tuple(
        make(rewards, [0] * first + [1] * (8 - first), lengths=lengths)
        for rewards, lengths in (
            ([1.0, 0.0, 0.5, 3.0, 0.5, 0.0, 1.0, 1.0], [1, 2, 3, 4, 4, 3, 2, 1]),
            ([4.0, 2.0, 2.5, 2.5, -1.0, 0.0, -1.0, 0.5], [2, 4, 1, 3, 2, 3, 3, 2]),
        )
    )
    for first in (3, 4)
)


def _of_rows(target: AdvantageTarget, batch: Batch) -> Floats | None:
    """float64 [N]: what all tokens of a row have; None where they differ."""
    found = target.advantages(batch)
    own = np.where(batch.mask, found, np.nan)
    if not np.isfinite(own[batch.mask]).all() or (np.nanmax(own, axis=1) - np.nanmin(own, axis=1)).max() > 1e-5:
        return None
    return np.asarray(np.nanmean(own, axis=1))


def recognised(target: AdvantageTarget) -> Design | None:
    """The design whose advantages, up to one scale, a function returns; None if none is."""
    for batches in (UNEVEN, EVEN):
        try:
            found = [_of_rows(target, batch) for batch in batches]
        except Exception:  # what a function from outside raises is its refusal
            continue
        rows = [own for own in found if own is not None]
        fitting = (d for d in DESIGNS if len(rows) == len(batches) and _fits(rows, batches, d))
        return next(fitting, None)
    return None


def _fits(found: list[Floats], batches: tuple[Batch, ...], design: Design) -> bool:
    forms = [design.of(b.rewards, b.groups.astype(float), b.lengths.astype(float)) for b in batches]
    own, form = np.concatenate(found), np.concatenate(forms)
    scale = float((own * form).sum() / (form**2).sum())
    # An epsilon in a divisor leaves a little.
    return scale > 0 and float(np.abs(own - scale * form).max()) < 2e-3 * float(np.abs(own).max())
