"""Credit graphs in verl, as advantage estimators and policy losses named "creditgraph:GRAPH".

    VERL_USE_EXTERNAL_MODULES=creditgraph.adapters.verl python -m verl.trainer.main_ppo \\
        algorithm.adv_estimator=creditgraph:mt_grpo actor_rollout_ref.actor.policy_loss.loss_mode=creditgraph:p_trace

verl imports the modules of that variable in each of its processes. For other settings, call `register` in a module of
one's own and name that.

verl passes rewards, masks and uids to an estimator, no token ids and no values. So graphs that read texts or a critic
cannot run, and where a graph compares the states of turns (`gigpo`, `gae_turns`), states are unknown without `states`.
"""

from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

from creditgraph.adapters.estimator import PREFIX, Estimator, Loss, States, check_version
from creditgraph.adapters.graph import graph_names

TESTED = ("0.9",)


def register(graph: str, *overrides: str, name: str = "", states: States | None = None) -> None:
    """Registers a graph as an estimator, and its objective as a policy loss, both under `name`.

    Args:
        graph, overrides: as of `CreditGraph`.
        name: by default "creditgraph:GRAPH".
        states: called with verl's arguments; returns a key of the state before each turn of each row.
    """
    name = name or PREFIX + graph
    loss = Loss(graph, *overrides)

    def policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        losses, metrics = loss(log_prob, old_log_prob, advantages, response_mask)
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        total = agg_loss(losses, response_mask, loss_agg_mode, **getattr(config, "global_batch_info", {}))
        return total, {f"actor/{key}": value for key, value in metrics.items()}

    register_adv_est(name)(Estimator(graph, *overrides, states=states))
    register_policy_loss(name)(policy_loss)


check_version("verl", TESTED)
for _graph in graph_names():
    register(_graph)
