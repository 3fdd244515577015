"""Credit graphs in SkyRL, as advantage estimators and policy losses named "creditgraph:GRAPH".

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=creditgraph.adapters.skyrl \\
        trainer.algorithm.advantage_estimator=creditgraph:mt_grpo trainer.algorithm.policy_loss_type=creditgraph:p_trace

For other settings, or an experiment class of one's own, call `register` before SkyRL's `validate_cfg`, and return a
`CreditTrainer` from the experiment's `get_trainer`:

    class Experiment(BasePPOExp):
        def get_trainer(self, *args, **kwargs):
            return CreditTrainer(*args, **kwargs)

SkyRL's estimators receive a mask of the whole response, what the environment wrote included. `CreditTrainer` gives a
graph the loss mask, whose runs of ones are the turns, and the token ids; of step-wise trajectories the steps of each.
Graphs that score texts ask SkyRL's workers, and those that continue responses its servers, where these have GPUs of
their own.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import ray
import torch
from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry, reduce_loss
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.utils import initialize_ray, validate_cfg
from torch import Tensor

from creditgraph.adapters.estimator import PREFIX, Estimator, Loss, States, check_version
from creditgraph.adapters.graph import graph_names
from creditgraph.adapters.skyrl_servers import Row, answers_of, attach
from creditgraph.adapters.skyrl_servers import check as check_servers
from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.learner.objective.trace import Trace
from creditgraph.pipeline.core.errors import ConfigError

TESTED = ("0.3",)


class SkyRLEstimator(Estimator):
    """An estimator that reads the batch of `CreditTrainer`."""

    serves = True
    batch: Any = None
    entries: Sequence[Row] | None = None
    """Of each row the entry in SkyRL's dataset, where a graph asks the policy"""
    last: list[bool] | None = None
    """Of step-wise trajectories, whether each row is the last step"""

    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        values: Tensor | None = None,
        *rest: Any,
        **given: Any,
    ) -> tuple[Tensor, Tensor]:
        """As `Estimator`, of rows that are padded on the left; those that only fill the batch get zeros."""
        if self.batch is None:
            raise ConfigError(
                f"{PREFIX}{self.graph}: SkyRL's estimators do not receive the mask of the sampled tokens. Start "
                "with trainer.override_entrypoint=creditgraph.adapters.skyrl, or return a CreditTrainer of that module "
                "from the get_trainer of your experiment."
            )
        rows = len(response_mask) - self.batch.metadata.get("pad_size", 0)
        width = response_mask.shape[1]
        # The trainer's own: with step-wise trajectories it passes ones.
        begins = (self.batch["response_mask"][:rows] != 0).int().argmax(1, keepdim=True)
        places = (torch.arange(width, device=begins.device) + begins) % width

        def at_left(value: Tensor) -> Tensor:
            return value[:rows].gather(1, places)

        known = [self.batch.get(name) for name in ("action_log_probs", "rollout_logprobs")]
        logprobs = next((x for x in known if x is not None), None)
        advantages, returns = super().__call__(
            at_left(token_level_rewards),
            at_left(self.batch["loss_mask"]),
            index[:rows],
            None if values is None else at_left(values),
            at_left(self.batch["sequences"][:, -width:]),
            logprobs=None if logprobs is None else at_left(logprobs),
            **self._steps(begins),
            **given,
        )
        out = torch.zeros(2, *response_mask.shape, dtype=advantages.dtype, device=advantages.device)
        out[0, :rows].scatter_(1, places, advantages)
        out[1, :rows].scatter_(1, places, returns)
        return out[0], out[1]

    def _steps(self, begins: Tensor) -> dict[str, Any]:
        """Of step-wise trajectories which steps belong together, and their prompts, which end where responses begin.

        A graph that asks a model reads the prompts in any case.
        """
        if self.last is None and not self.credit.scores:
            return {}
        if self.credit.scores and self.batch.get("pixel_values") is not None:
            self.credit.refuse_images()
        rows, width = len(begins), self.batch["response_mask"].shape[1]
        sequences, read = self.batch["sequences"][:rows], self.batch["attention_mask"][:rows] != 0
        before = torch.arange(sequences.shape[1], device=begins.device) < sequences.shape[1] - width + begins
        prompts = [row[kept].tolist() for row, kept in zip(sequences, read & before, strict=True)]
        steps = {} if self.last is None else {"episode": [0, *itertools.accumulate(self.last[: rows - 1])]}
        return steps | {"prompts": prompts, "answers": answers_of(self.entries)}


class SkyRLLoss(Loss):
    """A graph's objective under SkyRL's arguments, with its off-policy correction."""

    @property
    def settings(self) -> ObjectiveSettings:
        """As `Loss`; a bound on advantages is a ConfigError too, because SkyRL divides them before the loss."""
        settings = super().settings
        if isinstance(settings.config, Trace.Config) and settings.config.min_advantage is not None:
            raise ConfigError(
                f"graph '{self.graph}': its loss bounds advantages at {settings.config.min_advantage:g}, but SkyRL has "
                "divided them by numbers of tokens before. Set learner.objective.config.min_advantage=null in "
                "`register`, or choose another loss."
            )
        return settings

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The sum of the tokens' losses: SkyRL has divided the advantages as its `loss_reduction` says."""
        mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
        losses, metrics = super().__call__(log_probs, old_log_probs, advantages, mask)
        losses, mask, theirs = apply_off_policy_correction(
            losses, old_log_probs, rollout_logprobs, mask, config.off_policy_correction
        )
        return reduce_loss(losses, mask), metrics | theirs


class CreditTrainer(RayPPOTrainer):  # type: ignore[misc]
    """SkyRL's trainer; its estimators of credit graphs read the loss mask and the token ids."""

    def __init__(self, cfg: SkyRLTrainConfig, *args: Any, **kwargs: Any) -> None:
        check(cfg, isinstance(self, FullyAsyncRayPPOTrainer))
        super().__init__(cfg, *args, **kwargs)

    @torch.no_grad()
    def compute_advantages_and_returns(self, data: Any) -> Any:
        """SkyRL's own, with the batch in the hands of the estimator."""
        estimator = AdvantageEstimatorRegistry.get(self.cfg.trainer.algorithm.advantage_estimator)
        if not isinstance(estimator, SkyRLEstimator):
            return super().compute_advantages_and_returns(data)
        last = data.metadata["is_last_step"] if self.cfg.generator.step_wise_trajectories else None
        estimator.batch, estimator.last = data, last
        try:
            if estimator.credit.scores:
                uids = data.metadata["uids"]
                estimator.entries = attach(estimator, self, uids[: len(uids) - data.metadata.get("pad_size", 0)])
            if last is None:
                return super().compute_advantages_and_returns(data)
            # SkyRL would give the estimator the last steps alone, and spread a number over the others.
            data.metadata["is_last_step"] = [True] * len(last)
            data = super().compute_advantages_and_returns(data)
        finally:
            estimator.batch = estimator.last = estimator.entries = None
        data.metadata["is_last_step"] = last
        final = data["rewards"][torch.tensor(last[: len(last) - data.metadata.get("pad_size", 0)]).nonzero()[:, 0]]
        reward = final.sum(-1).mean().item()
        data.metadata["metrics"]["avg_final_rewards"] = self.all_metrics["loss/avg_final_rewards"] = reward
        return data


class CreditExperiment(BasePPOExp):  # type: ignore[misc]
    """SkyRL's experiment with a `CreditTrainer`."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
        """The trainer."""
        return CreditTrainer(*args, **kwargs)


def register(graph: str, *overrides: str, name: str = "", states: States | None = None) -> None:
    """Registers a graph as an estimator, and its objective as a policy loss; arguments of `adapters.verl.register`."""
    name = name or PREFIX + graph
    AdvantageEstimatorRegistry.register(name, SkyRLEstimator(graph, *overrides, states=states))
    PolicyLossRegistry.register(name, SkyRLLoss(graph, *overrides))


def register_all() -> None:
    """Registers every graph that ships."""
    check_version("skyrl", TESTED)
    for graph in graph_names():
        register(graph)


def check(cfg: SkyRLTrainConfig, asynchronous: bool = False) -> None:
    """Raises ConfigError where the chosen graphs cannot run in a trainer of SkyRL, before a model is loaded."""
    name = cfg.trainer.algorithm.advantage_estimator
    estimator = AdvantageEstimatorRegistry.get(name)
    loss = PolicyLossRegistry.get(cfg.trainer.algorithm.policy_loss_type)
    if isinstance(estimator, SkyRLEstimator):
        check_servers(estimator.credit, cfg)
        estimator.credit.check_loss(isinstance(loss, SkyRLLoss), f"Set trainer.algorithm.policy_loss_type={name}.")
    if isinstance(loss, SkyRLLoss):
        if asynchronous:
            raise ConfigError(
                f"{PREFIX}{loss.graph}: SkyRL's asynchronous trainer keeps no policy that the ratios of this loss "
                "could start from. Set trainer.algorithm.policy_loss_type to rollout_is or dppo."
            )
        loss.settings  # noqa: B018


def _run(cfg: SkyRLTrainConfig) -> None:
    CreditExperiment(cfg).run()


def main() -> None:
    """SkyRL's main program on this process's arguments; it calls this where trainer.override_entrypoint names it."""
    register_all()
    arguments = [word for word in sys.argv[1:] if not word.startswith("trainer.override_entrypoint=")]
    cfg = SkyRLTrainConfig.from_cli_overrides(arguments)
    validate_cfg(cfg)
    check(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(_run).remote(cfg))
