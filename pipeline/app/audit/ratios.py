"""Checks of what a loss does with extreme ratios, and where its clip begins."""

import numpy as np

from creditgraph.pipeline.app.audit.checks import Finding, passed, skipped
from creditgraph.pipeline.app.audit.loss_target import LossInputs, LossTarget, sample


def overflow(target: LossTarget) -> Finding:
    """Log ratios of ±50."""
    inputs = sample(0.05)
    signs = np.where(np.indices(inputs.logprobs.shape).sum(0) % 2, 50.0, -50.0)
    # Of one sign in a row they add up, and with float32 a product of ratios is beyond it.
    rows = np.where(np.indices(inputs.logprobs.shape)[0] % 2, 50.0, -50.0)
    for log_ratios, dtype in ((signs, np.float64), (rows, np.float64), (signs, np.float32), (rows, np.float32)):
        given = inputs.with_(old_logprobs=inputs.logprobs - log_ratios)
        kinds = ("logprobs", "old_logprobs", "reference_logprobs", "advantages")
        given = given.with_(**{kind: getattr(given, kind).astype(dtype) for kind in kinds})
        value, gradient = target.value_and_gradient(given)
        bad = int((~np.isfinite(gradient[inputs.batch.mask])).sum())
        if not np.isfinite(value) or bad:
            return Finding(
                verdict="fail",
                message=f"in {np.dtype(dtype).name} the loss is {value:.3g}, and {bad} gradients are no numbers",
                likely="the exponential of a log ratio, or of their sum over a row, overflows: clamp it first",
                example={"log ratios": log_ratios.tolist()},
                size=max(bad, 1),
            )
    return passed()


def clipping(target: LossTarget) -> Finding:
    """Rows that have moved far along their advantage, and with a dual clip those that have moved far against it."""
    names = [n for n in numeric_settings(target, "clip", "eps") if "clip" in n or float(target.settings[n]) >= 0.05]
    if not names or "old_logprobs" not in target.reads:
        return skipped("has no setting of a clip, or no ratio to be clipped")
    inputs = sample(0.0)
    mask, sign = inputs.batch.mask, np.sign(inputs.advantages)
    _, gradient = target.value_and_gradient(inputs.with_(logprobs=inputs.logprobs + 2.0 * sign))
    pushed = mask & (-gradient * sign > 1e-9)
    what = "tokens at ratios of e² along their advantage are moved on"
    if not pushed.any() and numeric_settings(target, "dual", "clip_ratio_c"):
        _, gradient = target.value_and_gradient(inputs.with_(logprobs=inputs.logprobs + 4.0 * (sign < 0)))
        pushed = mask & (sign < 0) & (np.abs(gradient) > 1e-9)
        what = "tokens of negative advantage at ratios of e⁴ still have a gradient, in spite of the dual clip"
    if not pushed.any():
        return _mirror(target, inputs, names) or _bounds(target, inputs) or passed(", ".join(names))
    return Finding(
        verdict="fail",
        message=f"{int(pushed.sum())} of {int(mask.sum())} {what} ({', '.join(names)})",
        example={"gradient": np.round(gradient, 5).tolist(), "advantages": inputs.advantages.tolist()},
        size=float(pushed.sum() / mask.sum()),
    )


def _mirror(target: LossTarget, inputs: LossInputs, names: list[str]) -> Finding | None:
    """A failure where rows that have moved against their advantage are not moved back."""
    mask, sign = inputs.batch.mask, np.sign(inputs.advantages)
    _, gradient = target.value_and_gradient(inputs.with_(logprobs=inputs.logprobs - 0.6 * sign))
    stopped = mask & ~(-gradient * sign > 1e-9)
    if not stopped.any():
        return None
    return Finding(
        verdict="fail",
        message=f"{int(stopped.sum())} of {int(mask.sum())} tokens that have moved against their advantage (ratios of "
        f"e^∓0.6) are not moved back: is the minimum with the unclipped term missing? ({', '.join(names)})",
        likely="the minimum with the unclipped term is missing",
        example={"gradient": np.round(gradient, 5).tolist(), "advantages": inputs.advantages.tolist()},
        size=float(stopped.sum() / mask.sum()),
    )


def _bounds(target: LossTarget, inputs: LossInputs) -> Finding | None:
    """A failure where the clip does not begin at 1 + high for positive and 1 − low for negative advantages."""
    names = numeric_settings(target, "clip", "eps")
    low, high = ([float(target.settings[n]) for n in names if part in n] for part in ("low", "high"))
    if len(low) != 1 or len(high) != 1 or not 0 < low[0] < 0.9 or not 0 < high[0] < 1 or low == high:
        return None
    mask, sign = inputs.batch.mask, np.sign(inputs.advantages)
    for share, moves in ((0.9, True), (1.1, False)):
        ratio = np.where(sign > 0, 1 + share * high[0], 1 - share * low[0])
        _, gradient = target.value_and_gradient(inputs.with_(logprobs=inputs.logprobs + np.log(ratio)))
        wrong = mask & ((-gradient * sign > 1e-9) != moves)
        if wrong.any():
            return Finding(
                verdict="fail",
                message=f"{int(wrong.sum())} of {int(mask.sum())} tokens "
                f"{'inside' if moves else 'outside'} 1 − {low[0]:g} … 1 + {high[0]:g} "
                f"{'have no' if moves else 'still have a'} gradient: are the two bounds exchanged?",
                likely="are the lower and the upper bound of the clip exchanged?",
                example={"ratio": np.round(ratio, 4).tolist(), "gradient": np.round(gradient, 5).tolist()},
                size=float(wrong.sum() / mask.sum()),
            )
    return None


def numeric_settings(target: LossTarget, *parts: str) -> list[str]:
    """Names of settings that are positive numbers and contain one of the parts."""
    numbers = {
        n for n, v in target.settings.items() if isinstance(v, int | float) and not isinstance(v, bool) and v > 0
    }
    return sorted(n for n in numbers if any(part in n for part in parts))
