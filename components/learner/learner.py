"""The base component of every learner: a rollout batch in, a report, new weights and log-probs out."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from creditgraph.components.learner.backend import Backend
from creditgraph.components.learner.metrics import LEARNER_METRICS, Guard
from creditgraph.components.learner.objective import shipped_metrics
from creditgraph.components.learner.packing.pack import pack
from creditgraph.components.learner.settings import LearnerSettings
from creditgraph.components.learner.step import RolloutTraining
from creditgraph.components.models.fixed_sequence import fixed_tokens
from creditgraph.components.models.gpus import own_kind
from creditgraph.components.models.load import load_config
from creditgraph.pipeline.core.component import Component, Context, same_rows
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import (
    Credit,
    ScoredSequence,
    TokenLogprobs,
    TrainReport,
    Trajectories,
    Weights,
    check_aligned,
)
from creditgraph.pipeline.core.ranks import use_device


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
        """Starts at version 0, when the engines have given their memory back."""
        super().setup(context)
        context.slots.begin()
        context.slots.add_learner(lambda: self.backend.offload(), lambda: self.backend.onload())
        self.guard = Guard(self.config.mismatch)
        self.version = 0
        self.trained_tokens = 0
        self._reading = threading.Lock()  # held while weights are streamed, and while they change

    def weights(self) -> Weights:
        """Returns a snapshot of the present weights; all ranks call it."""
        raise NotImplementedError

    def published(self) -> Weights:
        """The present weights, as a stream where readers are done before they change; all ranks call it."""
        if self.context.lockstep and self.backend.exports_alone and not self._publishes_adapter:
            weights = Weights(version=self.version, stream=partial(self._stream, self.version))
        else:
            weights = self.weights()
        return replace(weights, scored=self.scored())

    @property
    def _publishes_adapter(self) -> bool:
        return self.config.lora.publish == "adapter"

    def _stream(self, version: int) -> Iterator[tuple[str, Tensor]]:
        if not self._reading.acquire(blocking=False):
            raise CreditgraphError(
                f"node '{self.context.node}': weights version {version} are being changed or read; they can be read "
                "again when the next version is published."
            )
        try:
            if self.version != version:
                raise CreditgraphError(
                    f"node '{self.context.node}': expected a reader of weights version {self.version}, which this "
                    f"learner holds, got one of version {version}, which is gone."
                )
            use_device(self.context.device)  # the current device is a thread's own
            yield from self.backend.export()
        finally:
            self._reading.release()

    @torch.no_grad()
    def scored(self) -> ScoredSequence:
        """Log-probs of the fixed sequence on the device that holds the weights; all ranks call it."""
        context = self.context
        vocabulary = int(load_config(context.model).get_text_config().vocab_size)
        ids = torch.tensor([fixed_tokens(vocabulary, self.backend.max_context)], device=context.device)
        row = torch.zeros(1, dtype=torch.int64, device=context.device)
        batch = pack(
            Jagged.from_rows(ids[:, :1].tolist(), torch.int64).to(context.device),
            Jagged.from_rows(ids[:, 1:].tolist(), torch.int64).to(context.device),
            row,
        )
        logprobs = torch.zeros(ids.shape[1] - 1, device=context.device)
        # Ranks of an earlier pipeline stage have none.
        for rows in self.backend.score([batch], 1.0, reference=False):
            logprobs += rows.values
        mean = self.backend.sum(logprobs) / context.ranks.num_replicas
        return ScoredSequence(tokens=tuple(ids[0].tolist()), logprobs=tuple(mean.tolist()))

    def initial(self) -> dict[str, Any]:
        """The present weights: version 0, or those of the checkpoint after its state and shards are loaded."""
        return {"weights": self.published()}

    def run(self, *, trajectories: Trajectories, credit: Annotated[Credit, same_rows("trajectories")]) -> Outputs:
        """Trains on one rollout batch; all ranks call it, each with the rows of its replica."""
        check_aligned(trajectories, credit)
        self.context.slots.begin()
        training = RolloutTraining(self.config, self.context, self.backend, trajectories, credit, self.version)
        with self._reading:
            result = training.run()
            self.trained_tokens += result.tokens
            metrics = result.metrics | {"trained_tokens_total": float(self.trained_tokens)}
            self.guard.check(self.context.node, metrics)
            self.version += 1
        with training.clock("publish"):
            weights = self.published()
        phases = {f"seconds_{phase}": value for phase, value in training.seconds.items()}
        for phase, peak in training.memory.items():
            if peak.reserved:
                phases |= {f"memory_{phase}": peak.allocated, f"memory_{phase}_reserved": peak.reserved}
        frozen = bool(self.config.lora.rank)
        with_gradient, without = training.operations.tolist()
        tokens = metrics["forward_tokens"]
        rates = throughput(self.context, training.seconds, tokens, (with_gradient, without), frozen)
        self.context.log(**metrics, **self.backend.pass_metrics(), **phases, **rates)
        return Outputs(
            report=TrainReport(metrics=metrics, seconds=training.seconds),
            weights=weights,
            logprobs=TokenLogprobs(uid=trajectories.uid, logprobs=result.logprobs),
        )


PASSES = ("old_logprobs", "reference", "forward_backward", "optimizer")  # phases in which the model is passed


def throughput(
    context: Context, seconds: Mapping[str, float], tokens: float, operations: tuple[float, float], frozen: bool
) -> dict[str, float]:
    """The metrics `tokens_per_second` and `mfu`; {} without a GPU, no `mfu` for one whose rate is not known.

    Args:
        context: context of the learner's node.
        seconds: wall time by phase.
        tokens: tokens of training passes, of all replicas.
        operations: operations of forward passes with and without gradient, of all replicas.
        frozen: whether most weights have no gradient (LoRA), so that a backward pass costs one forward pass, not two.
    """
    if not context.device.startswith("cuda"):
        return {}
    gpus = context.ranks.world
    training = seconds.get("forward_backward", 0.0) + seconds.get("optimizer", 0.0)
    out = {"tokens_per_second": tokens / training / gpus} if training else {}
    kind = own_kind(context.device)
    spent = sum(seconds.get(phase, 0.0) for phase in PASSES)
    useful = (2 if frozen else 3) * operations[0] + operations[1]
    if kind and spent and useful and context.model.dtype == "bfloat16":
        out["mfu"] = useful / spent / gpus / kind.matmul
    return out
