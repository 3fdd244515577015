"""Credit graphs in verl, as advantage estimators and policy losses named "creditgraph:GRAPH".

    VERL_USE_EXTERNAL_MODULES=creditgraph.adapters.verl python -m verl.trainer.main_ppo \\
        algorithm.adv_estimator=creditgraph:mt_grpo actor_rollout_ref.actor.policy_loss.loss_mode=creditgraph:p_trace

verl imports the modules of that variable in each of its processes. For other settings, call `register` in a module of
one's own and name that.

verl passes rewards, masks and uids to an estimator, no token ids and no values. So graphs that read texts or a critic
cannot run, and where a graph compares the states of turns (`gigpo`, `gae_turns`), states are unknown without `states`.

An agent loop may give several outputs per session. verl shows them to an estimator as responses of their own, each with
the score of the last; a graph gets them as the steps of an episode with that score once.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, agg_loss, register_adv_est, register_policy_loss

from creditgraph.adapters.estimator import PREFIX, Estimator, Loss, States, check_version, on_import
from creditgraph.adapters.graph import graph_names

TESTED = ("0.9", "0.8", "0.7")  # the older ones by hand
# The step from rewards to advantages of verl's trainer, and the modules that hold it.
STEP = "compute_advantage_for_multi_trajectories"
MODULES = ("verl.trainer.ppo.v1.utils", "verl.trainer.ppo.v1.trainer_base")


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


def by_sessions(step: Callable[..., Any]) -> Callable[..., Any]:
    """verl's step from rewards to advantages, which gives graphs the outputs of a session as steps of an episode."""

    @functools.wraps(step)
    def stepped(data: Any, batch_keys: Sequence[str], adv_estimator: Any, *args: Any, **given: Any) -> Any:
        estimator = ADV_ESTIMATOR_REGISTRY.get(adv_estimator)
        outputs = [key.rsplit("_", 1) for key in batch_keys]  # uid_session, place of the output in it
        if not isinstance(estimator, Estimator) or len({session for session, _ in outputs}) == len(outputs):
            return step(data, batch_keys, adv_estimator, *args, **given)
        order = sorted(range(len(outputs)), key=lambda i: (outputs[i][0], int(outputs[i][1])))
        sessions = [outputs[i][0] for i in order]
        last = torch.tensor([one != other for one, other in pairwise([*sessions, None])])[:, None]
        # verl copies the score of the last output to the others; what is not a score, as a KL in the reward, is theirs.
        rewards, scores = (data.batch[name][order] for name in ("token_level_rewards", "token_level_scores"))
        advantages, returns = estimator(
            rewards.where(last, rewards - scores),
            data.batch["response_mask"][order],
            data.non_tensor_batch["uid"][order],
            episode=sessions,
            config=given.get("config"),
        )
        back = torch.tensor(order).argsort()
        data.batch["advantages"], data.batch["returns"] = advantages[back], returns[back]
        return data

    return stepped


def _step_of(module: Any) -> None:
    setattr(module, STEP, by_sessions(getattr(module, STEP)))


# verl imports this module while it is imported itself, when its trainer with all that it needs is not.
on_import(MODULES[0], _step_of)
if MODULES[1] in sys.modules:
    _step_of(sys.modules[MODULES[1]])
check_version("verl", TESTED)
for _graph in graph_names():
    register(_graph)
