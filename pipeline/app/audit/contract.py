"""What every audited function must do: return numbers of the right shape, the same each time, and change no input."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from creditgraph.pipeline.app.audit.batch import Batch, make
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed
from creditgraph.pipeline.app.audit.designs import recognised
from creditgraph.pipeline.app.audit.targets import AdvantageTarget, AuditError

SECONDS = 10.0  # of one call

BATCHES = (
    make([1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1], lengths=[3, 1, 2, 3]),
    make([1.0, 0.0, 0.5, 1.0, 0.0, 0.0], [0, 0, 0, 1, 1, 1], lengths=[3, 1, 2, 3, 2, 2]),
    make([1.0, 0.0, 0.0, 1.0], [0, 0, 0, 0], turns=[[0, -1, 1]] * 4, turn_rewards=[[0.5, 1.0]] * 4),
    make([1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0]),
)


class HangError(AuditError):
    """A call that took too long."""


@contextmanager
def limited(name: str, seconds: float = SECONDS) -> Iterator[None]:
    """Ends a call that takes longer; only in the main thread, and not inside a call of a compiled library."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise HangError(f"{name}: a call on a batch of at most 6 rows took more than {seconds:g} s.")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def returns(target: AdvantageTarget) -> Finding:
    """The function returns advantages at all; raises AuditError where no further check would mean anything."""
    try:
        with limited(target.name):
            result = target.advantages(BATCHES[0])
    except AuditError:
        raise
    except Exception as error:  # a function from outside may fail in any way
        raise AuditError(
            f"{target.name}: raised {type(error).__name__} on two groups of two rows: {error}. It was called with "
            f"{target.note}; --bind PARAMETER=COLUMN and -s PARAMETER=VALUE change that."
        ) from error
    bad = int((~np.isfinite(result[BATCHES[0].mask])).sum())
    if bad:
        example = {"batch": BATCHES[0].shown(), "advantages": result.tolist()}
        return Finding(verdict="fail", message=f"{bad} advantages are no numbers", example=example, size=bad)
    forms = "".join(f", {p} as {form}" for p, form in target.forms.items() if form not in ("", "bool"))
    design = recognised(target)
    known = f"; {design.words}" if design else ""
    return passed(f"called with {target.note}{forms}{known}" if target.note else known[2:])


def repeats(target: AdvantageTarget) -> Finding:
    """The same input twice."""
    for batch in BATCHES:
        results = _twice(target, batch)
        if results is None:
            continue
        first, second = results
        if not np.array_equal(first, second, equal_nan=True):
            example = {"batch": batch.shown(), "first": first.tolist(), "second": second.tolist()}
            gap = float(np.nanmax(np.abs(first - second)))
            message = f"two calls with the same input differ by {gap:.3g}; seed its random numbers to audit it further"
            return Finding(verdict="fail", message=message, example=example, size=gap)
    return passed()


def inputs(target: AdvantageTarget) -> Finding:
    """The arrays that the function was given."""
    for batch in BATCHES:
        _twice(target, batch)
    if not target.touched:
        return passed()
    names = ", ".join(sorted(target.touched))
    return Finding(verdict="fail", message=f"it changes {names} in place, which its caller may use again", size=1.0)


def _twice(target: AdvantageTarget, batch: Batch) -> tuple[Any, Any] | None:
    try:
        with limited(target.name):
            return target.advantages(batch), target.advantages(batch)
    except HangError:
        raise
    except Exception:  # a batch that the function refuses
        return None


CONTRACT = (
    Check(name="returns", layer="contract", title="Advantages are numbers, one per row or token.", run=returns),
    Check(name="repeats", layer="contract", title="The same input gives the same advantages.", run=repeats),
    Check(name="inputs", layer="contract", title="Its inputs are left as they are.", run=inputs),
)
