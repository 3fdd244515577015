"""Quality of resets: accuracy of the localised steps, and correction rates."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from torch import Tensor

from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.rollouts.thoughts import STEP_FRACTION, has_oracle, num_thoughts, true_first_errors
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Rewards, StepErrors, TrainReport, Trajectories, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Metrics of this iteration's resets."""

    report: TrainReport


def mean_where(values: Tensor, rows: Tensor) -> float | None:
    """Mean of values [N] over the rows [N bool]; None without rows, because their share is undefined and not 0."""
    return float(values[rows].double().mean()) if bool(rows.any()) else None


def reset_metrics(
    step: Tensor, count: Tensor, correct: Tensor, failure_row: Tensor, true_step: Tensor | None
) -> dict[str, float]:
    """Shares over failures [S] and their suffixes [N]; undefined shares (0 of 0) are left out.

    clean: failures whose step is at or before the true first error, so that the prefix holds no error; exact: equal to
    it. correction: suffixes that end correct; corrected: failures with at least one such suffix (pass@b). Both also for
    clean and for erroneous prefixes alone (2605.25507, figure 2).

    Args:
        step: int64 [S], localised step, 1-based.
        count: int64 [S], number of thoughts.
        correct: bool [N], outcome of each suffix.
        failure_row: int64 [N], the failure of each suffix.
        true_step: int64 [S], true first error, or None if the task does not provide it.
    """
    failures = torch.ones(len(step), dtype=torch.bool)
    has_suffix = torch.zeros_like(failures)
    has_suffix[failure_row] = True
    corrected = torch.zeros_like(failures)
    corrected[failure_row[correct]] = True
    shares: dict[str, float | None] = {
        "failures": Count(len(step)),
        "step_fraction": mean_where((step - 1) / count.clamp(min=1), failures),
        "correction": mean_where(correct, failures[failure_row]),
        "corrected": mean_where(corrected, has_suffix),
    }
    if true_step is not None:
        clean = step <= true_step
        shares |= {"clean": mean_where(clean, failures), "exact": mean_where(step == true_step, failures)}
        for name, kind in (("clean", clean), ("erroneous", ~clean)):
            shares[f"correction_{name}"] = mean_where(correct, kind[failure_row])
            shares[f"corrected_{name}"] = mean_where(corrected, has_suffix & kind)
    return {name: value for name, value in shares.items() if value is not None}


class Resets(Component):
    """Logs how often suffixes of failures end correct, and how often their reset step is at or before the first error.

    The latter requires the true first error: on tasks without an oracle only the former is logged. Suffixes whose
    reward is invalid do not count.
    """

    paper = "2605.25507"
    metrics = (
        Metric("failures", "failures", "failures with a localised step"),
        STEP_FRACTION,
        Metric("correction", "share", "suffixes that end correct"),
        Metric("corrected", "share", "failures with a suffix that ends correct"),
        Metric(
            "clean", "share", "failures reset at or before their true first error, so that the prefix holds no error"
        ),
        Metric("exact", "share", "failures reset at their true first error"),
        Metric("correction_clean", "share", "`correction` of clean prefixes"),
        Metric("corrected_clean", "share", "`corrected` of clean prefixes"),
        Metric("correction_erroneous", "share", "`correction` of prefixes that hold an error"),
        Metric("corrected_erroneous", "share", "`corrected` of prefixes that hold an error"),
    )

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when it is first used."""
        return load_tokenizer(self.context.model)

    def run(
        self,
        *,
        prompts: Prompts,
        failures: Trajectories,
        errors: Annotated[StepErrors, same_rows("failures")],
        trajectories: Trajectories,
        rewards: Rewards,
    ) -> Outputs:
        """Compares failures with the expander's `trajectories`; `rewards` are those of any batch that holds them."""
        check_aligned(failures, errors)
        # Rewards may be those of a larger batch that includes base groups.
        rows = rewards.index_of(trajectories.uid)
        suffixes = (trajectories.parent >= 0) & rewards.valid[rows]
        metrics = reset_metrics(
            errors.step,
            num_thoughts(failures),
            rewards.correct[rows][suffixes],
            failures.index_of(trajectories.parent[suffixes]),
            self._true_steps(prompts, failures),
        )
        self.context.log(**metrics)
        return Outputs(report=TrainReport(metrics={k: float(v) for k, v in metrics.items()}, seconds={}))

    def _true_steps(self, prompts: Prompts, failures: Trajectories) -> Tensor | None:
        if not len(failures) or not has_oracle(prompts):
            return None
        return true_first_errors(prompts, failures, self.tokenizer)
