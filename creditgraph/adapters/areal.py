"""Credit graphs in AReaL, by a subclass of its trainer:

    with CreditPPOTrainer(config, train_dataset, credit="gigpo") as trainer:
        trainer.train(workflow=workflow)

AReaL's workers compute rewards, their KL, and the returns that a critic learns. Its trainer has no hook for advantages:
the class replaces those of the whole batch in its own process, between `compute_advantages` and `ppo_update` of the
controller. AReaL's loss reads them, each token its own.
"""

from typing import Any

import torch
from areal import PPOTrainer
from areal.infra.rpc.rtensor import RTensor
from areal.utils import stats_tracker
from areal.utils.environ import is_single_controller

from creditgraph.adapters.estimator import check_version
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.loss import check_off
from creditgraph.adapters.rows import Rollouts, stacked
from creditgraph.pipeline.core.errors import ConfigError

TESTED = ("1.0.4",)
READ = ("loss_mask", "tot_rewards", "input_ids", "logprobs", "values")


class CreditPPOTrainer(PPOTrainer):  # type: ignore[misc]
    """AReaL's PPOTrainer, with the advantages of a credit graph.

    The rows that a workflow returns for one prompt are a group, and the runs of ones in a row's loss mask its turns. A
    reward is AReaL's, with its bias, scale, clip and KL, and belongs to the last turn.

    Args:
        credit: a `CreditGraph`, or the name of a graph.

    Raises:
        ConfigError: the graph needs what AReaL does not give, or a setting of AReaL has no part in its credit.
    """

    def __init__(self, config: Any, *args: Any, credit: CreditGraph | str, **kwargs: Any) -> None:
        check_version("areal", TESTED)
        self.credit = CreditGraph(credit) if isinstance(credit, str) else credit
        self.credit.check_given(values=config.critic is not None, logprobs=True)
        self.credit.check_loss(False)
        self._check(config)
        super().__init__(config, *args, **kwargs)

    def _check(self, config: Any) -> None:
        """Raises ConfigError for settings with which the graph would credit something else than it seems to."""
        place = f"graph '{self.credit.name}'"
        self.credit.sampled_at(config.gconfig.temperature)
        check_off(config.actor, {"reward_norm": None, "adv_norm": None}, place, "AReaL")
        if config.actor.kl_ctl > 0 and config.ref is None:
            raise ConfigError(
                f"{place}: actor.kl_ctl is {config.actor.kl_ctl:g} and there is no model `ref`, so AReaL adds that "
                "times the log-prob of each token to the rewards. Set actor.kl_ctl=0, or give ref."
            )
        if not is_single_controller():
            raise ConfigError(
                f"{place}: with AREAL_SPMD_MODE each process has a part of the batch; expected AReaL's single "
                "controller, `python train.py scheduler.type=local` say."
            )

    def train(self, workflow: Any = None, *args: Any, **kwargs: Any) -> None:
        """AReaL's; raises ConfigError where an agent's turns are credited and its rows do not say whose they are."""
        agents = workflow is None or self._requires_proxy_workflow(workflow)
        if self.credit.turns and agents and self.config.rollout.agent.export_style == "individual":
            raise ConfigError(
                f"graph '{self.credit.name}': it credits the turns of episodes, but rollout.agent.export_style is "
                "individual, by which each turn of an agent is a row without its episode. Set it to concat."
            )
        super().train(workflow, *args, **kwargs)

    def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
        """AReaL's controller; that of the policy returns the graph's advantages."""
        engine = super()._create_train_engine(actor_config, alloc)
        if actor_config is self.config.actor:
            of_areal = engine.compute_advantages
            engine.compute_advantages = lambda batch: self._credited(engine, of_areal(batch))
        return engine

    def _credited(self, engine: Any, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The batch, a group per item, with the graph's advantages; their places are those of the loss mask."""
        groups = RTensor.localize([{k: x for k, x in item.items() if k in READ} for item in batch])
        sizes = [len(group["loss_mask"]) for group in groups]
        level = self.config.actor.importance_sampling_level
        rows = self.credit(
            Rollouts(
                mask=stacked([group["loss_mask"] for group in groups]),
                rewards=stacked([group["tot_rewards"] for group in groups]),
                group=[i for i, size in enumerate(sizes) for _ in range(size)],
                # A place of the loss mask is that of the token after it.
                tokens=stacked([group["input_ids"].roll(-1, 1) for group in groups]),
                prompts=[row[:1].tolist() for group in groups for row in group["input_ids"]],
                logprobs=stacked([group["logprobs"] for group in groups]),
                values=stacked([group["values"] for group in groups]) if "values" in groups[0] else None,
            ),
            by_response="importance_sampling_level=sequence" if level == "sequence" else "",
        )
        # The trainer clears what is in the batch at the end of a step, so what leaves it is cleared now.
        engine.clear_batches([item["advantages"] for item in batch])
        for item, group, advantages in zip(batch, groups, torch.split(rows, sizes), strict=True):
            item["advantages"] = advantages[:, : group["loss_mask"].shape[1]].clone()
        stats_tracker.scalar(**{f"credit/{name}": value for name, value in self.credit.metrics.items()})
        return batch
