"""Checks of functions that turn log-probs and advantages into a loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from creditgraph.pipeline.app.audit.batch import Floats
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed, skipped
from creditgraph.pipeline.app.audit.contract import limited
from creditgraph.pipeline.app.audit.loss_cut import CUT, cut, padding
from creditgraph.pipeline.app.audit.loss_gradient import EXPECTED, later_steps
from creditgraph.pipeline.app.audit.loss_target import LossInputs, LossTarget, sample
from creditgraph.pipeline.app.audit.ratios import clipping, overflow
from creditgraph.pipeline.app.audit.targets import AuditError


def returns(target: LossTarget) -> Finding:
    """The function returns a loss at all, and the same one twice; raises AuditError where it does not return."""
    inputs = sample(0.05)
    try:
        with limited(target.name):
            (value, gradient), (again, _) = target.value_and_gradient(inputs), target.value_and_gradient(inputs)
    except AuditError:
        raise
    except Exception as error:  # a function from outside may fail in any way
        raise AuditError(
            f"{target.name}: raised {type(error).__name__} on six rows: {error}. It was called with {target.note}; "
            "--bind PARAMETER=COLUMN and -s PARAMETER=VALUE change that."
        ) from error
    if not np.isfinite(value) or not np.isfinite(gradient).all():
        bad = int((~np.isfinite(gradient)).sum())
        return Finding(verdict="fail", message=f"the loss is {value:.3g}, and {bad} gradients are no numbers", size=1.0)
    if target.changed:
        message = f"it writes into {', '.join(sorted(target.changed))}, which its caller uses again; copy them first"
        return Finding(verdict="fail", message=message, size=1.0)
    if value != again:
        message = f"two calls with the same input give {value:.6g} and {again:.6g}; seed its random numbers"
        return Finding(verdict="fail", message=message, size=abs(value - again))
    return passed(f"called with {target.note}" if target.note else "")


def differences(target: LossTarget) -> Finding:
    """Autograd against finite differences, at log-probs .05 nats from the old ones."""
    inputs = sample(0.05)
    _, gradient = target.value_and_gradient(inputs)
    step = 1e-4  # log-probs may be rounded to float32
    numeric = np.zeros_like(gradient)
    for place in zip(*inputs.batch.mask.nonzero(), strict=True):
        values = []
        for sign in (1.0, -1.0):
            moved = inputs.logprobs.copy()
            moved[place] += sign * step
            values.append(float(target.loss(inputs, torch.from_numpy(moved).requires_grad_()).detach()))
        numeric[place] = (values[0] - values[1]) / (2 * step)
    if not np.abs(numeric).max():
        return skipped("the value does not change with the log-probs; only its gradient is of use")
    gap = float(np.abs(np.where(inputs.batch.mask, gradient, 0.0) - numeric).max() / np.abs(numeric).max())
    if gap < 5e-3:
        return passed(f"largest difference {gap:.1e} of the largest gradient")
    if _weighted_logprobs(target, inputs, gradient) < 5e-3:
        return passed("the gradient of log-probs with weights that are held fixed, as of a score function")
    example = {"autograd": np.round(gradient, 5).tolist(), "differences": np.round(numeric, 5).tolist()}
    return Finding(
        verdict="fail",
        message=f"the gradient is not that of the value: they differ by {gap:.2g} of the largest entry",
        example=example,
        size=gap,
    )


def _weighted_logprobs(target: LossTarget, inputs: LossInputs, gradient: Floats) -> float:
    """How far the loss is from Σ w log π, with fixed weights w, plus a KL term of log π − log π_ref.

    A shift of all log-probs of a token leaves every ratio, and with it the weights and the KL term, as they are, so
    that the loss changes by w alone; a shift of the reference changes the KL term alone, by minus its gradient.
    """
    numeric = np.zeros_like(gradient)
    every = ("logprobs", "old_logprobs", "reference_logprobs")
    for place in zip(*inputs.batch.mask.nonzero(), strict=True):
        for kinds, sign in ((every, 1.0), (every[2:], -1.0)):
            for step in (1e-4, -1e-4):
                moved = {kind: getattr(inputs, kind).copy() for kind in kinds}
                for kind in kinds:
                    moved[kind][place] += step
                numeric[place] += sign * target.value_and_gradient(inputs.with_(**moved))[0] / (2 * step)
    largest = float(np.abs(gradient).max())
    return float(np.abs(np.where(inputs.batch.mask, gradient, 0.0) - numeric).max()) / largest if largest else 1.0


def token_credit(target: LossTarget) -> Finding:
    """At equal policies, more credit of one token of a row: its own gradient must change most."""
    if "advantages" not in target.reads:
        return skipped("takes no advantages")
    inputs = sample(0.0)
    mask = inputs.batch.mask
    _, before = target.value_and_gradient(inputs)
    # Rows of positive advantage: some losses bound negative ones.
    for row in ((mask.sum(1) > 1) & (inputs.advantages[:, 0] > 0)).nonzero()[0]:
        for token in mask[row].nonzero()[0]:
            more = inputs.advantages.copy()
            more[row, token] += 0.5
            _, after = target.value_and_gradient(inputs.with_(advantages=more))
            change = np.where(mask[row], (before - after)[row], 0.0)
            others = np.delete(change, token)[np.delete(mask[row], token)]
            if change[token] > np.abs(others).max() * (1 + 1e-6):
                continue
            averaged = np.ptp(change[mask[row]]) < 1e-6 * max(np.abs(change).max(), 1e-12) and change[token] > 0
            likely = (
                "does it average the advantages over the row? (a ratio of the whole sequence does so too; declare it "
                "if that is wanted)"
                if averaged
                else "are advantages shifted, or read from one token of the row?"
            )
            return Finding(
                verdict="fail",
                message=f"more credit of token {token} of row {row} does not move that token most; {likely}",
                likely=f"token credit is lost: {likely}",
                example={
                    "row": int(row),
                    "token": int(token),
                    "advantages": np.round(inputs.advantages[row][mask[row]], 3).tolist(),
                    "after": np.round(more[row][mask[row]], 3).tolist(),
                    "change of each token's push": np.round(change[mask[row]], 5).tolist(),
                },
                size=1.0,
            )
    return passed()


def on_policy(target: LossTarget) -> Finding:
    """At equal policies the gradient of each token is −w A with w > 0."""
    inputs = sample(0.0)
    _, gradient = target.value_and_gradient(inputs)
    mask = inputs.batch.mask
    weight = np.where(mask, -gradient / np.where(mask, inputs.advantages, 1.0), 0.0)
    wrong = mask & ~(weight > 0)
    if wrong.any():
        row, token = (int(x[0]) for x in wrong.nonzero())
        advantage, slope = float(inputs.advantages[row, token]), float(gradient[row, token])
        return Finding(
            verdict="fail",
            message=f"{int(wrong.sum())} of {int(mask.sum())} tokens do not move with their advantage: row {row}, "
            f"token {token} has advantage {advantage:+.3g} and gradient {slope:+.3g}",
            likely="is a sign turned round?" if wrong[mask].all() else "",
            example={"row": row, "token": token, "advantage": advantage, "gradient": slope},
            size=float(wrong.sum() / mask.sum()),
        )
    of_row = [weight[i][mask[i]] for i in range(len(mask))]
    even = max(float(w.max() / w.min()) for w in of_row)
    per_token = max(float(w.mean()) for w in of_row) / min(float(w.mean()) for w in of_row)
    return passed(f"weights of tokens differ by a factor of {even:.3g} within rows and {per_token:.3g} between rows")


def masked_tokens(target: LossTarget) -> Finding:
    """Log-probs of observations and padding."""
    inputs = sample(0.05, turns=True)
    value, gradient = target.value_and_gradient(inputs)
    outside = ~inputs.batch.mask
    noise = np.where(outside, 1.7, 0.0)
    other, _ = target.value_and_gradient(inputs.with_(logprobs=inputs.logprobs + noise))
    leak = float(np.abs(gradient[outside]).max(initial=0.0))
    moved = abs(other - value)
    if moved <= 1e-6 * max(1.0, abs(value)) and leak < 1e-9:
        return passed()
    return Finding(
        verdict="fail",
        message=f"tokens outside the mask move the loss by {moved:.3g}, and have gradients up to {leak:.3g}",
        likely="is the mask left out of a sum or mean, shifted by one, or turned round?",
        example={"mask": inputs.batch.mask.astype(int).tolist(), "gradient": np.round(gradient, 5).tolist()},
        size=max(moved, leak),
    )


def idle(target: LossTarget) -> Finding:
    """Settings without an effect."""
    changes = {
        name: [not v] if isinstance(v, bool) else [2 * v + 1, v / 4] if isinstance(v, float) else [v + 1, 2 * v + 3]
        for name, v in target.settings.items()
        if isinstance(v, bool | int | float) and name not in CUT
    }
    if not changes or target.with_settings is None:
        return skipped("has no settings that are numbers or switches")
    tried = [sample(distance, seed) for distance in (0.0, 0.05, 0.5, 3.0) for seed in range(3)]
    silent = []
    for name, values in changes.items():
        if not any(_moves(target, {name: value}, inputs) for value in values for inputs in tried):
            silent.append(name)
    if not silent:
        return passed(f"{len(changes)} settings")
    return Finding(
        verdict="fail",
        message=f"changing {', '.join(silent)} changes neither the loss nor a gradient",
        example={"settings": silent},
        size=len(silent),
    )


def _moves(target: LossTarget, change: dict[str, Any], inputs: LossInputs) -> bool:
    assert target.with_settings is not None
    value, gradient = target.value_and_gradient(inputs)
    try:
        other, moved = target.with_settings(change).value_and_gradient(inputs)
    except Exception:  # a refused value has an effect
        return True
    return other != value or not np.array_equal(gradient, moved)


def reference(target: LossTarget) -> Finding:
    """The KL term: none at equal policies, and it pulls towards the reference."""
    if "reference_logprobs" not in target.reads:
        return skipped("takes no log-probs of a reference")
    equal = sample(0.0)
    flat = equal.with_(advantages=np.zeros_like(equal.advantages))
    value, gradient = target.value_and_gradient(flat)
    if abs(value) > 1e-9 or np.abs(gradient).max() > 1e-9:
        return Finding(
            verdict="fail",
            message=f"with advantages 0 and equal policies the loss is {value:.3g}, gradients up to "
            f"{np.abs(gradient).max():.3g}; expected 0",
            example={"loss": value},
            size=max(abs(value), float(np.abs(gradient).max())),
        )
    mask = equal.batch.mask
    above = flat.with_(logprobs=flat.logprobs + np.where(mask, 0.5, 0.0), old_logprobs=flat.old_logprobs + 0.5)
    _, pull = target.value_and_gradient(above)
    if not np.abs(pull).max():
        return passed("no effect at these settings")
    against = mask & (pull < 0)
    if against.any():
        return Finding(
            verdict="fail",
            message=f"{int(against.sum())} of {int(mask.sum())} tokens that are likelier than under the reference are "
            "made likelier still",
            example={"gradient": np.round(pull, 5).tolist()},
            size=float(against.sum() / mask.sum()),
        )
    return passed("pulls towards the reference")


LOSS = (
    Check(name="loss_returns", layer="loss", title="The loss is a number, the same each time.", run=returns),
    Check(name="loss_gradient", layer="loss", title="The gradient is that of the value.", run=differences),
    Check(name="loss_on_policy", layer="loss", title="Each token moves with its advantage.", run=on_policy),
    Check(name="loss_token_credit", layer="loss", title="Each token moves with its own advantage.", run=token_credit),
    Check(name="loss_mask", layer="loss", title="Tokens outside the mask do not matter.", run=masked_tokens),
    Check(name="loss_padding", layer="loss", title="Padding does not matter.", run=padding),
    Check(name="loss_cut", layer="loss", title="The cut of the batch does not matter.", run=cut),
    Check(name="loss_settings", layer="loss", title="Every setting has an effect.", run=idle),
    Check(name="loss_reference", layer="loss", title="The KL term pulls towards the reference.", run=reference),
    Check(name="loss_clip", layer="loss", title="The clip stops what has moved far enough.", run=clipping),
    Check(name="loss_steps", layer="loss", title="After a step E[−∇ loss] is along ∇J still.", run=later_steps),
    Check(name="loss_overflow", layer="loss", title="Extreme ratios give numbers.", run=overflow),
    *EXPECTED,
)
