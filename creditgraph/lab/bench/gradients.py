"""Policy gradients of credit, prompt by prompt: their direction compared with the true gradient, and their variance.

Prompts of a batch are independent draws, so the mean over n prompts of per-prompt gradients g_p has covariance
Cov(g_p)/n. With g*_p the gradient of prompt p from true advantages, and sums over pairs p ≠ q (unbiased, because the
two are independent):

    ⟨ḡ, g*⟩ = Σ_{p≠q} ⟨g_p, g*_q⟩ / pairs      ‖ḡ‖² = Σ_{p≠q} ⟨g_p, g_q⟩ / (n(n − 1))      tr Cov = Σ ‖g_p‖²/n − ‖ḡ‖²

`cosine` = ⟨ḡ, g*⟩ / (‖ḡ‖ ‖g*‖) measures the bias of the direction; it is free of noise in expectation, so it may leave
[−1, 1] when there are few prompts. `tokens` is the number of sampled tokens at which the noise of a batch equals its
signal: tr Cov · (tokens per prompt) / (⟨ḡ, g*⟩/‖g*‖)². It compares variances at equal sampled tokens whatever the scale
of the credit. `steps` is the same in optimiser steps: tr Cov · (steps per prompt) / (⟨ḡ, g*⟩/‖g*‖)².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.learner.packing.pack import pack
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Trajectories


@dataclass
class GradientSums:
    """Sums over the prompts of one batch; sums of batches add up.

    Attributes:
        total: Σ g_p, float64 [parameters].
        squares: Σ ‖g_p‖².
        prompts: n.
        tokens: tokens that were sampled for the n gradients.
        steps: optimiser steps that learn from them.
        true_total, true_squares, true_prompts: the same for g*.
        common: Σ ⟨g_p, g*_p⟩ over prompts that both have, from the same rollouts or not.
        num_common: number of those prompts.
    """

    total: Tensor
    squares: float
    prompts: int
    tokens: float
    steps: int
    true_total: Tensor
    true_squares: float
    true_prompts: int
    common: float
    num_common: int

    @staticmethod
    def of(gradients: dict[int, Tensor], truth: dict[int, Tensor], tokens: float, steps: int = 1) -> GradientSums:
        """From gradients by prompt uid, and true gradients by prompt uid."""
        size = next(iter(truth.values())) if truth else next(iter(gradients.values()))
        zero = torch.zeros_like(size, dtype=torch.float64)
        shared = [p for p in gradients if p in truth]
        return GradientSums(
            total=sum((g.double() for g in gradients.values()), zero),
            squares=sum(_dot(g, g) for g in gradients.values()),
            prompts=len(gradients),
            tokens=tokens,
            steps=steps,
            true_total=sum((g.double() for g in truth.values()), zero),
            true_squares=sum(_dot(g, g) for g in truth.values()),
            true_prompts=len(truth),
            common=sum(_dot(gradients[p], truth[p]) for p in shared),
            num_common=len(shared),
        )

    def __add__(self, other: GradientSums) -> GradientSums:
        return GradientSums(**{k: v + getattr(other, k) for k, v in vars(self).items()})

    def metrics(self) -> dict[str, float]:
        """cosine, noise (tr Cov), signal (projection on the true gradient), tokens, steps; NaN with too few prompts or
        no signal."""
        n = self.prompts
        m = self.true_prompts
        pairs = n * m - self.num_common
        if n < 2 or m < 2 or pairs < 1:
            return dict.fromkeys(("cosine", "noise", "signal", "tokens", "steps"), math.nan)
        # Pairs p = q are left out: one prompt's two gradients share its rollouts, so their product is biased.
        cross = (_dot(self.total, self.true_total) - self.common) / pairs
        size = (_dot(self.total, self.total) - self.squares) / (n * (n - 1))
        true_size = (_dot(self.true_total, self.true_total) - self.true_squares) / (m * (m - 1))
        noise = self.squares / n - size
        signal = cross / math.sqrt(true_size) if true_size > 0 else math.nan
        relative = noise / n / signal**2 if signal > 0 else math.nan
        return {
            "cosine": cross / math.sqrt(size * true_size) if size > 0 and true_size > 0 else math.nan,
            "noise": noise,
            "signal": signal,
            "tokens": relative * self.tokens,
            "steps": relative * self.steps,
        }


def _dot(a: Tensor, b: Tensor) -> float:
    return float(a.double() @ b.double())


def pooled(parts: Sequence[GradientSums]) -> dict[str, float]:
    """Metrics of all parts together."""
    return reduce(add, parts).metrics()


def leave_one_out(parts: Sequence[GradientSums], metric: str) -> list[float]:
    """The metric without each of the parts in turn; [] for a single part."""
    if len(parts) < 2:
        return []
    return [pooled([*parts[:i], *parts[i + 1 :]])[metric] for i in range(len(parts))]


def prompt_gradients(
    model: LearnerModel, trajectories: Trajectories, weight: Jagged, temperature: float
) -> dict[int, Tensor]:
    """Prompt uid → n ∇ Σ_k w_k log π(y_k) over its rows, float32 [parameters]; their mean is the batch's gradient.

    Args:
        model: π, with gradients.
        trajectories: the rows.
        weight: coefficient of each token's log-prob, as it enters the batch's gradient; rows of zeros cost nothing.
        temperature: temperature of the log-probs.
    """
    parameters = list(model.trainable().values())
    device = parameters[0].device
    gradients: dict[int, Tensor] = {}
    prompts = torch.unique(trajectories.prompt_uid).tolist()
    # Rows without any weight have no gradient; a forward pass would be wasted on them.
    moving = weight.with_values(weight.values != 0).sum() > 0
    prompt_tokens = trajectories.prompt_tokens.to(str(device))
    response = trajectories.response_tokens.to(str(device))
    for uid in prompts:
        rows = ((trajectories.prompt_uid == uid) & moving).nonzero(as_tuple=True)[0].to(device)
        if not len(rows):
            gradients[uid] = torch.zeros(sum(p.numel() for p in parameters))
            continue
        logprobs, _ = model.logprobs(pack(prompt_tokens, response, rows), temperature)
        coefficient = weight.select(rows.cpu()).values.to(device, logprobs.values.dtype)
        grads = torch.autograd.grad((logprobs.values * coefficient).sum(), parameters, allow_unused=True)
        flat = [
            torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(parameters, grads, strict=True)
        ]
        gradients[uid] = torch.cat(flat).float().cpu() * len(prompts)
    return gradients
