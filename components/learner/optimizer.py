"""AdamW with float32 master weights, gradient clipping, a learning-rate schedule, and a plain state dict."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from creditgraph.components.learner.dtensors import cut, gather


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    lr: float = 1e-6
    """peak learning rate"""
    betas: tuple[float, float] = (0.9, 0.999)
    """decay of the first and second moment"""
    eps: float = 1e-8
    """added to the root of the second moment"""
    weight_decay: float = 0.0
    """decoupled decay per step of weight matrices (not of norms, biases and embeddings), as a multiple of the learning
    rate"""
    grad_clip: float = 1.0
    """largest global gradient norm; 0 does not clip"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """course of the learning rate after warm-up; linear and cosine end at 0 with the last planned iteration"""
    warmup: int = 0
    """optimiser steps of linear warm-up"""

    def __post_init__(self) -> None:
        if self.lr < 0 or self.grad_clip < 0 or self.weight_decay < 0 or self.warmup < 0:
            raise ValueError(
                f"expected lr, weight_decay, grad_clip and warmup ≥ 0, got {self.lr}, {self.weight_decay}, "
                f"{self.grad_clip} and {self.warmup}."
            )
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"expected two betas in [0, 1), got {self.betas}.")
        if self.eps < 0:
            raise ValueError(f"expected eps ≥ 0, got {self.eps}.")


def learning_rate(settings: OptimizerSettings, step: int, total: int) -> float:
    """Learning rate of optimiser step `step` (from 0) of `total` planned ones; 0 beyond the end of a falling schedule.

    >>> s = OptimizerSettings(lr=1.0, schedule="linear", warmup=2)
    >>> [learning_rate(s, i, 6) for i in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    share = min(1.0, (step - settings.warmup) / max(1, total - settings.warmup))
    falling = 1.0 - share if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return settings.lr * falling


class Update(NamedTuple):
    """One optimiser step.

    Attributes:
        grad_norm: norm of the gradient before clipping; 0 for a step that was skipped.
        lr: learning rate of the step.
        applied: whether the weights were updated.
    """

    grad_norm: float
    lr: float
    applied: bool


class Schedule:
    """The learning rate of the coming step, and how many steps were counted.

    Args:
        settings: settings of the schedule.
        total_steps: planned optimiser steps.
    """

    def __init__(self, settings: OptimizerSettings, total_steps: int) -> None:
        self.settings = settings
        self.total_steps = total_steps
        self.step_count = 0

    def advance(self) -> float:
        """Counts a step, applied or skipped, so that the schedule keeps to the plan; returns its learning rate."""
        rate = learning_rate(self.settings, self.step_count, self.total_steps)
        self.step_count += 1
        return rate


class Optimizer:
    """AdamW over named parameters.

    Parameters below float32 get a float32 master copy: gradients of micro-batches are summed there, the update happens
    there, and the parameter receives the rounded result.

    Args:
        parameters: name → parameter to train.
        settings: settings of AdamW and the schedule.
        total_steps: planned optimiser steps, for the schedule.
        no_decay: names of parameters without weight decay, in addition to those of fewer than two dimensions.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], settings: OptimizerSettings, total_steps: int, no_decay: set[str]
    ) -> None:
        self.settings = settings
        self.schedule = Schedule(settings, total_steps)
        self._parameters = parameters
        self._masters: dict[str, Tensor] = {
            n: p if p.dtype == torch.float32 else p.detach().float().clone().requires_grad_()
            for n, p in parameters.items()
        }
        self._narrow = [n for n, p in parameters.items() if self._masters[n] is not p]
        decays = {n: m.dim() > 1 and n not in no_decay for n, m in self._masters.items()}
        groups = []
        for which, weight_decay in ((True, settings.weight_decay), (False, 0.0)):
            members = [m for n, m in self._masters.items() if decays[n] == which]
            if members:
                groups.append({"params": members, "weight_decay": weight_decay})
        self._adam = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)

    def collect(self) -> None:
        """Moves gradients of narrow parameters to their masters; call after each micro-batch's backward pass."""
        for name in self._narrow:
            parameter = self._parameters[name]
            master = self._masters[name]
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def step(self, reduce: Callable[[Tensor], Tensor] | None = None) -> Update:
        """Clips, updates and drops the gradients; a non-finite gradient changes nothing but the schedule.

        Args:
            reduce: sums a tensor over replicas; None for one replica.
        """
        masters = list(self._masters.values())
        if reduce is not None:
            for master in masters:
                master.grad = reduce(torch.zeros_like(master) if master.grad is None else master.grad)
        grads = [m.grad for m in masters if m.grad is not None]
        norm = gather(nn.utils.get_total_norm(grads)) if grads else torch.zeros(())
        rate = self.schedule.advance()
        applied = math.isfinite(float(norm))
        if applied:
            if self.settings.grad_clip:
                nn.utils.clip_grads_with_norm_(masters, self.settings.grad_clip, norm)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self.masters_changed()
        self._drop_gradients()
        return Update(float(norm), rate, applied)

    def skip(self) -> Update:
        """Counts a step without an update and drops the gradients."""
        self._drop_gradients()
        return Update(0.0, self.schedule.advance(), applied=False)

    def _drop_gradients(self) -> None:
        self._adam.zero_grad(set_to_none=True)
        for name in self._narrow:
            self._parameters[name].grad = None

    def offloadable(self) -> tuple[list[Tensor], list[Tensor]]:
        """Masters, moments and gradients; and the parameters, which stay."""
        moments = [v for state in self._adam.state.values() for v in state.values() if isinstance(v, Tensor)]
        masters = list(self._masters.values())
        stay: list[Tensor] = list(self._parameters.values())
        gradients = [p.grad for p in (*masters, *stay) if p.grad is not None]
        return [*masters, *moments, *gradients], stay

    def state_dict(self) -> dict[str, Any]:
        """Master weights and moments by parameter name, and the step count; all copies, on the CPU."""
        moments = {
            n: {k: v.detach().to("cpu", copy=True) for k, v in self._adam.state[m].items()}
            for n, m in self._masters.items()
            if self._adam.state.get(m)
        }
        return {
            "masters": {n: m.detach().to("cpu", copy=True) for n, m in self._masters.items()},
            "moments": moments,
            "step_count": self.schedule.step_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`, parameters included."""
        missing = sorted(set(self._masters) ^ set(state["masters"]))
        if missing:
            raise ValueError(
                f"learner: the checkpoint and the model differ in {len(missing)} trained parameters, first "
                f"'{missing[0]}'; expected the model and LoRA settings that wrote the checkpoint. Resume with the same "
                "configuration, or start a new run."
            )
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(cut(state["masters"][name], master))
        self._adam.state.clear()
        for name, moments in state["moments"].items():
            master = self._masters[name]
            # The fused kernel needs the step counter on the parameter's device.
            self._adam.state[master] = {k: cut(v.detach(), master) for k, v in moments.items()}
        self.schedule.step_count = int(state["step_count"])
        self.masters_changed()

    def tensors(self) -> dict[str, Tensor]:
        """Master weights, moments and step counters as "kind/parameter", not copies; moments of no steps are 0."""
        out: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state = self._adam.state[master]
            if not state:
                state["step"] = torch.zeros((), device=master.device)
                state |= {k: torch.zeros_like(master, requires_grad=False) for k in ("exp_avg", "exp_avg_sq")}
            out |= {"master/" + name: master.detach()} | {f"{kind}/{name}": value for kind, value in state.items()}
        return out

    @torch.no_grad()
    def masters_changed(self) -> None:
        """Rounds the master weights to the parameters."""
        for name in self._narrow:
            self._parameters[name].copy_(self._masters[name])
