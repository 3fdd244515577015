"""What a failure most likely comes from: a sentence that is read before the counter-examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from creditgraph.pipeline.app.audit.batch import make
from creditgraph.pipeline.app.audit.checks import Finding
from creditgraph.pipeline.app.audit.critic import generalised
from creditgraph.pipeline.app.audit.designs import WORDS, recognised
from creditgraph.pipeline.app.audit.targets import AdvantageTarget

BATCH = make([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 0, 1, 1, 1], lengths=[3, 4, 2, 4, 3, 2])


def likely(target: Any, found: Sequence[Finding], names: Sequence[str]) -> str:
    """The likely fault of an advantage function some of whose checks fail; "" where each failure tells its own.

    Args:
        target: what was audited.
        found: its failures.
        names: of their checks.
    """
    if not found or not isinstance(target, AdvantageTarget):
        return ""
    told = next((finding.likely for finding in found if finding.likely), "")
    if told:
        return told
    try:
        return next(_of_advantages(target, frozenset(names)), "")
    except Exception:  # what a function from outside raises is its refusal
        return ""


def _of_advantages(target: AdvantageTarget, names: frozenset[str]) -> Iterator[str]:
    if names & WORDS["whitening"] and generalised(target).verdict == "pass":
        yield "this is GAE, whitened over the batch. If that is wanted: --declare whitening"
    design = recognised(target)
    if design is not None and design.declare:
        yield f"these are {design.words}. If that is wanted: --declare {design.declare}"
    result = np.nan_to_num(target.advantages(BATCH))
    other = np.nan_to_num(target.advantages(BATCH.with_(rewards=1.0 - BATCH.rewards)))
    size = np.maximum(np.abs(result), np.abs(other))
    own = np.where(BATCH.mask, size, 0.0)
    if not own.any():
        yield "no token ever gets credit: is a mask turned round, or is everything subtracted from itself?"
    if not own[:, 0].any():
        yield "the first token of a row never gets credit: are advantages or the mask shifted by one?"
    if not own[np.arange(len(BATCH)), BATCH.last].any():
        yield "the last token of a row never gets credit: are advantages or the mask shifted by one?"
    if size[~BATCH.mask].max() > 0 and not own[:, 1:].any():
        yield "credit is where the mask is 0: is the mask turned round?"
    mean = np.where(BATCH.mask, result, 0.0).sum(1) / BATCH.lengths
    if (mean[BATCH.rewards == 1] < -1e-6).all() and (mean[BATCH.rewards == 0] >= 0).all():
        yield "rows with the higher reward have the lower advantage: is a sign turned round?"
    if "groups" in target.reads and names & {"row_order", "relabelled_groups", "other_groups", "uneven_groups"}:
        moved = np.nan_to_num(target.advantages(BATCH.with_(groups=np.array([0, 1, 0, 1, 0, 1]))))
        if np.allclose(moved, result, atol=1e-6):
            yield "the group ids change nothing: are groups taken from the places of rows, or is the batch one group?"
    if names & {"uneven_groups"} and not names & {"other_groups"}:
        yield "groups of different sizes are mixed up: are rows reshaped to groups of one size?"
    if names & {"padding"}:
        yield "the width of the batch matters: does a mean count padding?"
    if names & {"invalid_rows", "truncated_rows"} and len(names) <= 2:
        yield "a row without credit of its own stays in the mean of its group"
    if names & {"no_signal"} and len(names) <= 2:
        yield "a deviation of 0, or of rounding, divides: is the epsilon too small, or a group of one not looked for?"
