"""What must not change a loss: padding, and how a batch is cut into micro-batches."""

from __future__ import annotations

import numpy as np

from creditgraph.pipeline.app.audit.checks import Finding, passed
from creditgraph.pipeline.app.audit.loss_target import LossTarget, sample

CUT = ("micro_batch_size", "micro_batches", "num_micro_batches", "minibatch_size", "gradient_accumulation_steps")
"""parameters that say how a batch is cut, which must not change the loss"""


def padding(target: LossTarget) -> Finding:
    """More padding."""
    inputs = sample(0.05)
    value, gradient = target.value_and_gradient(inputs)
    other, wide = target.value_and_gradient(inputs.padded(3))
    gap = float(np.abs(gradient - wide[:, : gradient.shape[1]]).max() / max(np.abs(gradient).max(), 1e-12))
    if gap < 1e-5 and abs(value - other) < 1e-5 * max(1.0, abs(value)):
        return passed()
    return Finding(
        verdict="fail",
        message=f"three more tokens of padding change the loss from {value:.5g} to {other:.5g}, gradients by {gap:.2g}",
        likely="a mean or a sum counts padding, or the width of the batch divides",
        example={"loss": value, "padded": other, "batch": inputs.shown()},
        size=gap,
    )


def cut(target: LossTarget) -> Finding:
    """The batch cut into micro-batches."""
    inputs = sample(0.05)
    value, gradient = target.value_and_gradient(inputs)
    names = [name for name in target.settings if name in CUT]
    if names and target.with_settings is not None:
        for count in (1, 2, 3, 6):
            other, moved = target.with_settings(dict.fromkeys(names, count)).value_and_gradient(inputs)
            gap = float(np.abs(moved - gradient).max() / max(np.abs(gradient).max(), 1e-12))
            if gap > 1e-5:
                return Finding(
                    verdict="fail",
                    message=f"{names[0]} {count} changes the loss from {value:.5g} to {other:.5g}, gradients by "
                    f"{gap:.2g}",
                    example={names[0]: [target.settings[names[0]], count], "loss": [value, other]},
                    size=gap,
                )
        return passed(f"{', '.join(names)} changes nothing")
    parts = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
    halves = [target.value_and_gradient(inputs.rows(rows)) for rows in parts]
    gaps = {}
    sizes = {
        "rows": [len(rows) for rows in parts],
        "tokens": [int(inputs.batch.mask[rows].sum()) for rows in parts],
        "mean": [1] * len(parts),
        "sum": [1] * len(parts),
    }
    for how, weights in sizes.items():
        joined = np.zeros_like(gradient)
        for rows, weight, (_, part) in zip(parts, weights, halves, strict=True):
            share = 1.0 if how == "sum" else weight / sum(weights)
            joined[rows] += share * part[:, : gradient.shape[1]]
        gaps[how] = float(np.abs(joined - gradient).max() / max(np.abs(gradient).max(), 1e-12))
    best = min(gaps, key=lambda how: gaps[how])
    told = {
        "rows": "weighted by their rows",
        "tokens": "weighted by their tokens",
        "mean": "averaged",
        "sum": "added up",
    }
    example = {"loss": value, "losses of rows 0–1, 2–3, 4–5": [v for v, _ in halves], "batch": inputs.shown()}
    if target.accumulate is not None and gaps[target.accumulate] >= 1e-5:
        better = f"; they would have to be {told[best]}" if gaps[best] < 1e-5 else ""
        return Finding(
            verdict="fail",
            message=f"micro-batches are {told[target.accumulate]}, and their gradient is off the whole batch's by "
            f"{gaps[target.accumulate]:.2g}{better}",
            likely="each micro-batch is divided by its own count, not by that of the whole batch",
            example=example,
            size=gaps[target.accumulate],
        )
    if gaps[best] < 1e-5:
        return passed(f"micro-batches give the whole batch's gradient if they are {told[target.accumulate or best]}")
    return Finding(
        verdict="fail",
        message="no weighting of micro-batches by rows or tokens gives the whole batch's gradient (off by "
        f"{gaps[best]:.2g})",
        likely="the loss of a row depends on the rows beside it: a statistic or a choice over the micro-batch",
        example=example,
        size=gaps[best],
    )
