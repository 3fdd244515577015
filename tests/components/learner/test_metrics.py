"""Engine against learner."""

import logging
import math

import pytest
import torch

from creditgraph.components.learner.metrics import Guard, Mismatch, MismatchError, mismatch_meters, mismatch_values
from creditgraph.components.learner.objective import Meters


def mismatch(learner, engine, mask=None):
    meters = Meters()
    mismatch_meters(
        meters,
        torch.tensor(learner),
        torch.tensor(engine),
        torch.ones(len(learner), dtype=torch.bool) if mask is None else mask,
    )
    return mismatch_values(meters.values())


def test_effective_sample_size_by_hand():
    # Ratios 1 and 3: (1 + 3)² / (2 · (1 + 9)) = 16 / 20.
    assert mismatch([-1.0, math.log(3.0) - 2.0], [-1.0, -2.0])["mismatch_ess"] == pytest.approx(0.8)
    # A common factor changes nothing, equal log-probs give 1, masked tokens do not count.
    assert mismatch([-1.0, -2.0], [-1.5, -2.5])["mismatch_ess"] == pytest.approx(1.0)
    assert mismatch([-1.0, -2.0], [-1.0, -2.0])["mismatch_ess"] == 1.0
    assert mismatch([-1.0, -9.0], [-1.0, -2.0], torch.tensor([True, False]))["mismatch_ess"] == 1.0


def test_no_comparable_token_has_no_sample_size():
    assert "mismatch_ess" not in mismatch([-1.0], [-2.0], torch.tensor([False]))


def test_warns_once_and_stops(caplog):
    guard = Guard(Mismatch(warn=0.1, stop=0.5))
    with caplog.at_level(logging.WARNING, logger="creditgraph"):
        guard.check("learner", {"mismatch_abs": 0.05})
        assert not caplog.records
        guard.check("learner", {"mismatch_abs": 0.2})
        guard.check("learner", {"mismatch_abs": 0.3})
    assert len(caplog.records) == 1
    assert (
        "node 'learner': engine and learner differ by 0.2 nats per token at equal weights (mean |Δ log p|), above "
        "mismatch.warn = 0.1" in caplog.text
    )
    for bad in (0.6, math.nan):
        with pytest.raises(
            MismatchError,
            match=(
                r"node 'learner'.*expected at most mismatch.stop = 0.5. Check the engine: .*another sampling "
                r"temperature"
            ),
        ):
            guard.check("learner", {"mismatch_abs": bad})
    Guard(Mismatch(warn=0, stop=0)).check("learner", {"mismatch_abs": math.inf})
    # Each of the other warnings comes once too, with its share and the next step.
    caplog.clear()
    for _ in range(2):
        guard.check("learner", {"mismatch_abs": 0.02, "mismatch_clipped": 0.29, "high_entropy_ties": 0.4})
    assert len(caplog.records) == 2
    assert "29.0% of the trained tokens are clipped before the first optimiser step" in caplog.text
    assert "|Δ log p| 0.02 nats). Set learner.old_logprobs=recompute." in caplog.text
    assert "40.0% of the trained tokens, of entropy 0, tie at the threshold 0 and are left out" in caplog.text
    with pytest.raises(ValueError, match=r"expected warn ≥ 0, stop ≥ 0 and clipped ≥ 0 .*, got -1"):
        Mismatch(warn=-1)
