"""Rewards with finite values, as several nodes require them."""

import torch

from creditgraph.pipeline.core.payloads import Rewards


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
