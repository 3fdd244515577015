"""Functions that turn log-probs and advantages into a loss, and what they are called with."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditgraph.pipeline.app.audit.batch import Batch, Floats, make
from creditgraph.pipeline.app.audit.targets import LOSS_COLUMNS, AuditError, bind, call_in_a_form, column_of


@dataclass(frozen=True, eq=False, kw_only=True)
class LossInputs:
    """What a loss is called with; float64 [N, T] where not said otherwise.

    Attributes:
        batch: the rows.
        logprobs, old_logprobs, reference_logprobs: log-probs of the response tokens.
        advantages: credit of each token, 0 outside the mask.
    """

    batch: Batch
    logprobs: Floats
    old_logprobs: Floats
    reference_logprobs: Floats
    advantages: Floats

    def shown(self) -> list[dict[str, Any]]:
        """The rows as a person reads them."""
        kinds = ("logprobs", "old_logprobs", "advantages")
        rows = self.batch.shown()
        for i, row in enumerate(rows):
            row.update({kind: np.round(getattr(self, kind)[i, : row["tokens"]], 3).tolist() for kind in kinds})
        return rows

    def with_(self, **changes: Any) -> LossInputs:
        """A copy with some fields replaced."""
        return LossInputs(**{**vars(self), **changes})

    def rows(self, index: Any) -> LossInputs:
        """Some rows."""
        return LossInputs(batch=self.batch.rows(index), **{k: v[index] for k, v in vars(self).items() if k != "batch"})

    def padded(self, more: int) -> LossInputs:
        """The same rows with `more` tokens of padding, in which log-probs are not 0."""

        def widened(name: str, value: Floats) -> Floats:
            fill = 0.0 if name == "advantages" else -1.3
            return np.concatenate([value, np.full((len(value), more), fill)], axis=1)

        values = {k: widened(k, v) for k, v in vars(self).items() if k != "batch"}
        return LossInputs(batch=self.batch.padded(self.batch.width + more), **values)


@dataclass(frozen=True, kw_only=True)
class LossTarget:
    """A function from log-probs and advantages to a loss.

    Attributes:
        name: as the user named it.
        call: the loss of the inputs at log-probs given as a tensor that needs a gradient: a scalar, or a loss per
            token, which is summed over the mask; of a tuple, its first part.
        changed: names of parameters that the function has written into so far.
        accumulate: how the trainer weights micro-batches: "sum", "mean", "rows" or "tokens"; None if that is not known.
        reads: columns that it is given.
        settings, with_settings, declares, note: as of `AdvantageTarget`.
    """

    name: str
    call: Callable[[LossInputs, Tensor], Any]
    reads: frozenset[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    with_settings: Callable[[Mapping[str, Any]], LossTarget] | None = None
    declares: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    changed: set[str] = field(default_factory=set)
    accumulate: str | None = None

    def loss(self, inputs: LossInputs, logprobs: Tensor) -> Tensor:
        """The loss as a scalar."""
        result = self.call(inputs, logprobs)
        result = result[0] if isinstance(result, tuple) else result
        if not isinstance(result, Tensor):
            raise AuditError(f"{self.name}: expected a loss as a torch tensor, got {type(result).__name__}.")
        if result.ndim:
            if tuple(result.shape) != inputs.batch.mask.shape:
                raise AuditError(
                    f"{self.name}: expected a scalar or a loss per token of shape {list(inputs.batch.mask.shape)}, got "
                    f"{list(result.shape)}."
                )
            result = torch.where(torch.from_numpy(inputs.batch.mask), result, 0.0).sum()
        return result

    def value_and_gradient(self, inputs: LossInputs) -> tuple[float, Floats]:
        """The loss and its gradient by each log-prob, float64 [N, T]."""
        leaf = torch.from_numpy(inputs.logprobs.copy()).requires_grad_()
        value = self.loss(inputs, leaf)
        if not value.requires_grad:
            return float(value.detach()), np.zeros_like(inputs.logprobs)
        (gradient,) = torch.autograd.grad(value, leaf)
        return float(value.detach()), gradient.numpy()


def loss_function(
    function: Callable[..., Any],
    name: str,
    given: Mapping[str, str],
    settings: Mapping[str, Any],
    accumulate: str | None = None,
) -> LossTarget:
    """The target of a plain function; `accumulate` is by default its attribute `audit_accumulate`, if it has one."""
    binding = bind(function, name, given, settings)
    parameters = inspect.signature(function).parameters
    changed: set[str] = set()
    forms: dict[str, str] = {}

    def call(inputs: LossInputs, logprobs: Tensor) -> Any:
        return call_in_a_form(lambda forms: once(inputs, logprobs, forms), binding.columns, forms)

    def once(inputs: LossInputs, logprobs: Tensor, forms: Mapping[str, str]) -> Any:
        values: dict[str, Any] = {}
        for parameter, column in binding.columns.items():
            if column == "logprobs":
                values[parameter] = logprobs
            elif column == "ppo_kl":
                values[parameter] = torch.from_numpy(inputs.old_logprobs) - logprobs
            elif column in LOSS_COLUMNS:
                values[parameter] = torch.from_numpy(getattr(inputs, column).copy())
            else:
                form = forms.get(parameter, "")
                values[parameter] = column_of(inputs.batch, column, "torch", parameters[parameter].annotation, form)
        before = {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}
        result = function(**values, **copy.deepcopy(dict(binding.settings)))
        changed.update(n for n, value in before.items() if not torch.equal(value.nan_to_num(), values[n].nan_to_num()))
        return result

    def again(changed: Mapping[str, Any]) -> LossTarget:
        return loss_function(function, name, given, {**settings, **changed}, accumulate)

    return LossTarget(
        name=name,
        call=call,
        reads=frozenset(binding.columns.values()),
        settings=binding.settings,
        with_settings=again,
        declares=dict(getattr(function, "audit_declares", {})),
        note=f"{binding.told} as torch arrays",
        changed=changed,
        accumulate=accumulate or getattr(function, "audit_accumulate", None),
    )


def sample(distance: float, seed: int = 0, turns: bool = False) -> LossInputs:
    """Six rows in two groups; the log-probs of policy and old policy are about `distance` nats apart."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    rows = [[0] * n for n in (1, 4, 2, 3, 4, 2)]
    if turns:
        rows = [[0, 0, -1, 1][: len(row)] for row in rows]
    batch = make([1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 1, 1, 1], turns=rows)
    old = -rng.uniform(0.2, 2.0, batch.mask.shape)
    centred = batch.rewards - np.repeat([1 / 3, 2 / 3], 3)
    return LossInputs(
        batch=batch,
        logprobs=old + distance * rng.standard_normal(old.shape),
        old_logprobs=old,
        reference_logprobs=old + distance * rng.standard_normal(old.shape),
        advantages=np.where(batch.mask, centred[:, None], 0.0),
    )
