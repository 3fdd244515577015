"""The base component of every learner: a rollout batch in, a report, new weights and log-probs out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from components.learner.metrics import LEARNER_METRICS, Guard
from components.learner.objective import shipped_metrics
from components.learner.settings import LearnerSettings
from components.learner.step import Backend, RolloutTraining
from pipeline.core.component import Component, Context, same_rows
from pipeline.core.metric import Metric
from pipeline.core.payloads import Credit, TokenLogprobs, TrainReport, Trajectories, Weights, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Report, weights and log-probs of one iteration."""

    report: TrainReport
    weights: Weights
    logprobs: Annotated[TokenLogprobs, same_rows("trajectories")]


class PolicyLearner(Component):
    """Base of learners. A subclass loads a model and sets `backend` in `setup`, and defines the published `weights`."""

    placement = "collective"
    remakes = frozenset({"weights"})
    metrics = (*LEARNER_METRICS, *shipped_metrics())

    @dataclass(frozen=True, kw_only=True)
    class Config(LearnerSettings):
        """Settings of every learner."""

    config: LearnerSettings
    backend: Backend

    @classmethod
    def metrics_of(cls, config: Any) -> tuple[Metric, ...]:
        """The metrics of learners and of the chosen objective, which may be from another package."""
        return (*cls.metrics, *config.objective.build().metrics)

    def setup(self, context: Context) -> None:
        """Starts at version 0."""
        super().setup(context)
        self.guard = Guard(self.config.mismatch)
        self.version = 0
        self.trained_tokens = 0

    def weights(self) -> Weights:
        """Returns a snapshot of the present weights; all ranks call it."""
        raise NotImplementedError

    def initial(self) -> dict[str, Any]:
        """The present weights: version 0, or those of the checkpoint after its state and shards are loaded."""
        return {"weights": self.weights()}

    def run(self, *, trajectories: Trajectories, credit: Annotated[Credit, same_rows("trajectories")]) -> Outputs:
        """Trains on one rollout batch; all ranks call it, each with the batch of all replicas."""
        check_aligned(trajectories, credit)
        training = RolloutTraining(self.config, self.context, self.backend, trajectories, credit, self.version)
        result = training.run()
        self.trained_tokens += result.tokens
        metrics = result.metrics | {"trained_tokens_total": float(self.trained_tokens)}
        self.guard.check(self.context.node, metrics)
        self.version += 1
        with training.clock("publish"):
            weights = self.weights()
        seconds = {f"seconds_{phase}": value for phase, value in training.seconds.items()}
        self.context.log(**metrics, **self.backend.pass_metrics(), **seconds)
        return Outputs(
            report=TrainReport(metrics=metrics, seconds=training.seconds),
            weights=weights,
            logprobs=TokenLogprobs(uid=trajectories.uid, logprobs=result.logprobs),
        )
