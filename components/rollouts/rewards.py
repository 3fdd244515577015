"""Rewards as several nodes need them: finite values, and the punishment of overlong responses."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.core.payloads import Rewards


def finite_rewards(rewards: Rewards) -> Rewards:
    """Rows with a NaN or infinite value become value 0, incorrect and invalid, with the reason in `detail`."""
    bad = ~torch.isfinite(rewards.value)
    if not bool(bad.any()):
        return rewards
    detail = [
        f"reward is {value}" + (f" ({text})" if text else "") if is_bad else text
        for value, is_bad, text in zip(rewards.value.tolist(), bad.tolist(), rewards.detail, strict=True)
    ]
    return rewards.replace(
        value=rewards.value.masked_fill(bad, 0.0),
        correct=rewards.correct & ~bad,
        valid=rewards.valid & ~bad,
        detail=detail,
    )


def overlong_punishment(length: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft overlong punishment, float32 [N] in [−1, 0], of response lengths [N] in tokens.

    0 up to max_length − buffer; ((max_length − buffer) − length) / buffer up to max_length; −1 beyond.
    With buffer 0 it is the hard form: −1 beyond max_length, else 0. Source: 2503.14476, equation 13.
    """
    if buffer == 0:
        return -(length > max_length).float()
    return ((max_length - buffer - length).float() / buffer).clamp(-1.0, 0.0)
