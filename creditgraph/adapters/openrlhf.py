"""Credit graphs in OpenRLHF, by a function that Ray calls in each of its workers:

    ray job submit --runtime-env=credit.yaml -- python3 -m openrlhf.cli.train_ppo_ray …

with credit.yaml:

    worker_process_setup_hook: creditgraph.adapters.openrlhf.install
    env_vars: {CREDITGRAPH_GRAPH: gigpo advantage.omega=0.5}

`CREDITGRAPH_LOSS=true` among the variables takes the graph's loss too. OpenRLHF has a fixed list of estimators and
losses, so a subclass takes the place of its experience maker, and one that of its loss. What follows from
`--algo.advantage.estimator` otherwise stays: which models are loaded, and what a critic learns.

OpenRLHF passes rewards, the mask of the sampled tokens, token ids and log-probs, reference answers, and a critic's
values. Graphs that score texts ask the workers that train.
"""

import logging
import os
import shlex
from typing import Any

import torch

from creditgraph.adapters.endpoint import EndpointPolicy
from creditgraph.adapters.estimator import Loss, check_version, on_import
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.openrlhf_workers import OpenRLHFPolicy
from creditgraph.adapters.rows import Rollouts, reference_answers, stacked
from creditgraph.pipeline.core.errors import ConfigError

logger = logging.getLogger("creditgraph")
TESTED = ("0.11.2",)


def install() -> None:
    """Puts the graph of `CREDITGRAPH_GRAPH` in the place of OpenRLHF's estimators once this process imports them.

    Raises:
        ConfigError: `CREDITGRAPH_GRAPH` is not set, or `CREDITGRAPH_LOSS` is neither true nor false.
    """
    graph = shlex.split(os.environ.get("CREDITGRAPH_GRAPH", ""))
    if not graph:
        raise ConfigError(
            'OpenRLHF: no graph is chosen; put CREDITGRAPH_GRAPH, as in "gigpo advantage.omega=0.5", into the '
            "env_vars of Ray's runtime environment."
        )
    with_loss = os.environ.get("CREDITGRAPH_LOSS", "false").lower()
    if with_loss not in ("true", "false"):
        raise ConfigError(f"OpenRLHF: CREDITGRAPH_LOSS is '{with_loss}'; expected true or false.")
    check_version("openrlhf", TESTED)
    on_import(
        "openrlhf.trainer.ppo_utils.experience_maker", lambda module: _credit(module, with_loss == "true", *graph)
    )
    if with_loss == "true":
        on_import("openrlhf.models.loss", lambda module: _loss(module, *graph))


def _credit(module: Any, with_loss: bool, *graph: str) -> None:
    """Replaces the class that turns rewards into advantages."""

    class CreditMaker(module.RemoteExperienceMaker):  # type: ignore[misc]
        """OpenRLHF's experience maker, with the advantages of a graph."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.credit = CreditGraph(*graph)
            if isinstance(self.credit.policy, EndpointPolicy):
                self.credit.sampled_at(self.args.rollout.temperature)
            elif self.credit.scores and not self.credit.samples:
                self.credit.attach(OpenRLHFPolicy(self))
            self.credit.check_given(values=self.args.algo.advantage.estimator == "gae", logprobs=True)
            self.credit.check_loss(with_loss, "Set CREDITGRAPH_LOSS=true.")
            logger.warning("creditgraph: advantages are those of the graph '%s'.", " ".join(graph))

        @torch.no_grad()
        def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
            """OpenRLHF's penalties, statistics and returns, then the graph's advantages of all responses."""
            if self.credit.scores and any(image for experience in experiences for image in experience.images):
                self.credit.refuse_images()
            divergences = [experience.kl for experience in experiences]
            experiences = super().compute_advantages_and_returns(experiences)
            rewards = [
                module.compute_reward(
                    experience.rewards,
                    self.kl_ctl.value,
                    divergence,
                    action_mask=experience.action_mask,
                    reward_clip_range=self.args.reward.clip_range,
                )
                for experience, divergence in zip(experiences, divergences, strict=True)
            ]
            values = [experience.values for experience in experiences]
            rows = self.credit(
                Rollouts(
                    mask=stacked([experience.action_mask for experience in experiences]),
                    rewards=stacked(rewards),
                    # As OpenRLHF groups them: in the order in which they were sampled.
                    group=[i // self.args.rollout.n_samples_per_prompt for e in experiences for i in e.index],
                    # A place of a mask is that of the token after it.
                    tokens=stacked([experience.sequences[:, 1:] for experience in experiences]),
                    prompts=[row[:1].tolist() for experience in experiences for row in experience.sequences],
                    values=None if values[0] is None else stacked(values),
                    logprobs=stacked([experience.action_log_probs for experience in experiences]),
                    answers=reference_answers(label for experience in experiences for label in experience.labels),
                    temperature=self.args.rollout.temperature,
                ),
                by_response="policy_loss_type=gspo" if self.args.actor.policy_loss_type == "gspo" else "",
            )
            parts = torch.split(rows, [len(experience.index) for experience in experiences])
            for experience, part in zip(experiences, parts, strict=True):
                experience.advantages = part[:, : experience.action_mask.shape[1]].to(experience.advantages)
                experience.info |= {f"credit/{k}": torch.full((len(part),), x) for k, x in self.credit.metrics.items()}
            return experiences

    module.RemoteExperienceMaker = CreditMaker


def _loss(module: Any, *graph: str) -> None:
    """Replaces the loss of the policy."""

    class CreditLoss(module.PolicyLoss):  # type: ignore[misc]
        """The objective of a graph with OpenRLHF's aggregation."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            extra = [
                name
                for name, on in (
                    ("actor.dual_clip", self.dual_clip is not None),
                    ("algo.advantage.is_correction_level", self.is_correction_level != "off"),
                    ("actor.policy_loss_type gspo", self.policy_loss_type != "ppo"),
                )
                if on
            ]
            if extra:
                raise ConfigError(f"OpenRLHF: the loss of a graph has no part for {', '.join(extra)}; leave it off.")
            self.of_tokens = Loss(*graph)
            _ = self.of_tokens.settings  # raises for one that needs more than a hook passes

        def forward(
            self,
            log_probs: torch.Tensor,
            old_log_probs: torch.Tensor,
            advantages: torch.Tensor,
            action_mask: torch.Tensor | None = None,
            rollout_log_probs: torch.Tensor | None = None,
            **totals: Any,
        ) -> tuple[Any, ...]:
            """Loss, share of clipped tokens, KL to the sampling policy, and None twice, as OpenRLHF reads them."""
            mask = torch.ones_like(log_probs) if action_mask is None else action_mask
            losses, metrics = self.of_tokens(log_probs, old_log_probs, advantages, mask)
            total = module.aggregate_loss(losses, mask, token_level_loss=self.token_level_loss, **totals)
            kl = module.masked_mean((old_log_probs - log_probs).detach(), mask, dim=None)
            return total, torch.tensor(metrics.get("clip_fraction", 0.0), device=total.device), kl, None, None

    module.PolicyLoss = CreditLoss
