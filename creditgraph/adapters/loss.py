"""An objective on the log-probs of another trainer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.learner.objective import LossInputs, Meters, ObjectiveSettings, loss_terms
from creditgraph.components.learner.objective.loss import prepare, weights
from creditgraph.components.learner.objective.meters import AllSum
from creditgraph.pipeline.core.component import identity_sum
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.jagged import Jagged

COLUMN = "creditgraph/"


def loss_inputs(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_entropies: Tensor | None = None,
    group: Tensor | None = None,
    columns: dict[str, Tensor] | None = None,
) -> LossInputs:
    """Rows of tensors [N, T] as the inputs of an objective: of each row the tokens up to the last trained one.

    Args:
        logprobs: of the sampled tokens, with the gradient.
        old_logprobs: denominators of the ratios.
        advantages: [N, T], or [N] for the same on all tokens.
        mask: not 0 where a token is trained on.
        old_entropies: of the sampling distribution, for entropy masks.
        group: int64 [N], for entropy masks over groups.
        columns: those of `prepared`.
    """
    trained = mask != 0
    kept = trained.flip(1).cumsum(1).flip(1) > 0
    lengths = kept.sum(1)

    def jagged(value: Tensor) -> Jagged:
        return Jagged.from_lengths(value[kept], lengths)

    old = jagged(old_logprobs.detach().float())
    advantages = advantages.unsqueeze(1).expand_as(logprobs) if advantages.dim() == 1 else advantages
    entropies = torch.full_like(old_logprobs, torch.nan) if old_entropies is None else old_entropies
    return LossInputs(
        logprobs=jagged(logprobs.float()),
        old_logprobs=old,
        engine_logprobs=old,
        advantage=jagged(advantages.float()),
        mask=jagged(trained),
        group=torch.arange(len(mask), device=mask.device) if group is None else group,
        old_entropies=jagged(entropies.detach().float()),
        columns={name: jagged(value) for name, value in (columns or {}).items()},
    )


def padded(rows: Jagged, width: int) -> Tensor:
    """[N, width] of rows that start at the first place."""
    out = rows.values.new_zeros(len(rows), width)
    out[rows.row_ids, rows.positions] = rows.values
    return out


def token_losses(inputs: LossInputs, settings: ObjectiveSettings, width: int) -> tuple[Tensor, dict[str, float]]:
    """Loss of each token, float32 [N, width], 0 where it is not trained on; and the objective's metrics.

    Inputs without the columns of `prepared` are prepared here, each part of a batch by itself.
    """
    meters = Meters()
    if not inputs.columns:
        inputs = prepare(inputs, settings, meters)
    terms = loss_terms(inputs, settings, meters)
    return padded(terms.with_values(terms.values.where(inputs.mask.values, 0.0)), width), meters.values()


def prepared(
    inputs: LossInputs, settings: ObjectiveSettings, width: int, all_sum: AllSum = identity_sum
) -> dict[str, Tensor]:
    """Columns that the objective computes from a whole batch of responses, each [N, width]; {} without any.

    `all_sum` adds up a tensor on the CPU over the processes that share the batch.
    """
    ready = prepare(inputs.to("cpu"), settings, Meters(), all_sum)
    device = inputs.group.device
    return {name: padded(column, width).to(device) for name, column in ready.columns.items()}


def loss_weights(mask: Tensor, settings: ObjectiveSettings, rows: float, tokens: float) -> Tensor:
    """Weight of each token's loss, float32 [N, T], in a step of so many rows and trained tokens over all ranks."""
    trained = Jagged.from_lengths((mask != 0).flatten(), torch.full((len(mask),), mask.shape[1], device=mask.device))
    return weights(trained, settings, torch.tensor([rows, tokens], dtype=torch.float64)).values.view(mask.shape)


def check_off(trainer: object, off: dict[str, Any], place: str, name: str, more: Sequence[str] = ()) -> None:
    """Raises ConfigError where an attribute of the trainer is not what it is when off; `more` says what else is on."""
    found = {setting: getattr(trainer, setting, none) for setting, none in off.items()}
    on = [f"{setting}={value!r} (off: {off[setting]!r})" for setting, value in found.items() if value != off[setting]]
    on += more
    if on:
        raise ConfigError(f"{place}: its credit has no part for {name}'s {', '.join(on)}. Switch that off.")


def ratio_per_response(trainer: Any) -> str:
    """The setting by which a loss of TRL or ms-swift moves all tokens of a response alike; "" without it."""
    # CISPO's ratio has no gradient.
    alike = trainer.importance_sampling_level == "sequence" and trainer.loss_type != "cispo"
    return "importance_sampling_level=sequence" if alike else ""


def check_by_parts(settings: ObjectiveSettings, place: str) -> None:
    """Raises ConfigError for an objective that needs the whole batch, where a hook is called with parts of it."""
    if settings.entropy_mask.keep < 1 or settings.kl.coefficient:
        raise ConfigError(
            f"{place}: its loss needs entropies of the whole batch, or a reference model (entropy_mask, "
            "kl), which this trainer's loss hook does not pass. Set learner.objective.entropy_mask.keep=1, "
            "or choose another graph; the trainer's own KL term can be used."
        )


def check_by_steps(settings: ObjectiveSettings, place: str) -> None:
    """Raises ConfigError for an objective that needs more than the rows that a process has of a step."""
    if settings.kl.coefficient:
        raise ConfigError(
            f"{place}: its loss has a KL term, which needs a reference model; set learner.objective.kl.coefficient=0, "
            "and train with the trainer's own loss (objective=False) where it shall have such a term."
        )
    if settings.entropy_mask.keep < 1 and settings.entropy_mask.scope == "group":
        raise ConfigError(
            f"{place}: its loss compares the entropies of a group, which may lie in several processes; set "
            "learner.objective.entropy_mask.scope=batch or sequence."
        )
