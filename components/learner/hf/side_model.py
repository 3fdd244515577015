"""What models that are trained beside the policy, on its rollouts, share: the critic and the implicit reward."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from creditgraph.components.learner.hf.learner import HFBackend
from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.learner.hf.node import HFNode
from creditgraph.components.learner.hf.settings import HFSettings, HFStepSettings
from creditgraph.components.learner.hf.sharding import Sharding
from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.learner.optimizer import Optimizer
from creditgraph.pipeline.core.component import Component, Context
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.metric import Metric

SIDE_METRICS = (
    Metric("grad_norm", "1", "norm of the gradient before clipping"),
    Metric("lr", "1", "learning rate"),
    Metric("updates", "steps", "optimiser steps"),
    Metric("skipped_updates", "steps", "steps left out because loss or gradient was not finite"),
    Metric("seconds_<phase>", "s", "wall time of a phase"),
)


@dataclass(frozen=True, kw_only=True)
class SideSettings(HFStepSettings):
    """Initial weights, steps and optimiser."""

    path: str = ""
    """folder or hub name of the initial weights, a model with the policy's tokenizer; "": those of the policy"""

    def loss(self) -> ObjectiveSettings:
        """The loss with which it trains."""
        raise NotImplementedError

    def training(self) -> HFSettings:
        """The settings of `learner.hf` with which it trains."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(HFStepSettings)}
        return HFSettings(objective=self.loss(), skip_zero_rows=False, **own)


class SideModel(HFNode, Component):
    """A model that a graph trains beside its policy, with the sharding, packing and checkpoints of `learner.hf`.

    Where several ranks make up a replica (model parallelism of the policy's learner), each holds a whole one.
    """

    placement = "collective"
    config: SideSettings

    @classmethod
    def alone(cls, config: Any) -> Any:
        """Not sharded."""
        return dataclasses.replace(config, fsdp_size=1)

    def wrapped(self, model: Any, settings: HFSettings, shards: tuple[Sharding, str] | None) -> LearnerModel:
        """The loaded model as it is trained."""
        raise NotImplementedError

    def setup(self, context: Context) -> None:
        """Loads the model and makes the optimiser, when the engines have given their memory back."""
        super().setup(context)
        from creditgraph.components.models.load import check_context

        context.slots.begin()
        context.slots.add_learner(lambda: self.backend.offload(), lambda: self.backend.onload())
        settings = self.config.training()
        if context.ranks.per_replica > 1:
            if settings.fsdp_size > 1:
                raise ConfigError(
                    f"node '{context.node}': expected fsdp_size 0 or 1 where {context.ranks.per_replica} ranks make up "
                    f"a replica, got {settings.fsdp_size}. Set {context.node}.fsdp_size=1, or use learner.hf."
                )
            settings = dataclasses.replace(settings, fsdp_size=1)
        spec = dataclasses.replace(context.model, path=self.config.path or context.model.path)
        model, shards = self.load(context, spec, settings)
        max_context = check_context(spec, model.config)
        self.model = self.wrapped(model, settings, shards)
        self.optimizer = Optimizer(
            self.model.trainable(),
            settings.optimizer,
            total_steps=context.iterations * settings.steps_per_batch,
            no_decay=self.model.embedding_names(),
        )
        self.backend = HFBackend(context, self.model, self.optimizer, max_context, shards[0] if shards else None)
        self.version = 0
        self.trained_tokens = 0
