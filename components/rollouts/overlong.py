"""Soft punishment of overlong responses (DAPO)."""

from __future__ import annotations

from torch import Tensor


def overlong_punishment(length: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft overlong punishment, float32 [N] in [−1, 0], of response lengths [N] in tokens.

    0 up to max_length − buffer; ((max_length − buffer) − length) / buffer up to max_length; −1 beyond.
    With buffer 0 it is the hard form: −1 beyond max_length, else 0. Source: 2503.14476, equation 13.
    """
    if buffer == 0:
        return -(length > max_length).float()
    return ((max_length - buffer - length).float() / buffer).clamp(-1.0, 0.0)
