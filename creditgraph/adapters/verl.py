"""Credit graphs in verl, as advantage estimators and policy losses named "creditgraph:GRAPH".

    VERL_USE_EXTERNAL_MODULES=creditgraph.adapters.verl python -m verl.trainer.main_ppo \\
        algorithm.adv_estimator=creditgraph:mt_grpo actor_rollout_ref.actor.policy_loss.loss_mode=creditgraph:p_trace

verl imports the modules of that variable in each of its processes. For other settings, call `register` in a module of
one's own and name that.

verl passes rewards, masks and uids to an estimator. So the functions of its trainers that call one are replaced: graphs
read the values of its critic (`critic.enable=true`) and, where they compare what turns have read, the token ids.

An agent loop may give several outputs per session. verl shows them to an estimator as responses of their own, each with
the score of the last; a graph gets them as the steps of an episode with that score once. So it is with the requests of
an agent under Agent Lightning. Graphs that score texts ask the workers of the trainer, those that continue responses
its servers, where they are awake.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    register_adv_est,
    register_policy_loss,
)

from creditgraph.adapters.estimator import PREFIX, Estimator, Loss, States, check_version, on_import
from creditgraph.adapters.graph import graph_names
from creditgraph.adapters.rows import differs_within, reference_answers
from creditgraph.adapters.verl_servers import COLUMNS, VerlRewards, attach
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.jagged import Jagged

TESTED = ("0.9", "0.8", "0.7")  # the older ones by hand
TRAINER = "verl.trainer.ppo"
LOSSES = set[str]()
"""names of policy losses that are those of graphs"""


class VerlEstimator(Estimator):
    """An estimator whose graph may ask verl's model, and read the entropies that its V1 trainer keeps."""

    serves = entropies = True


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

    register_adv_est(name)(VerlEstimator(graph, *overrides, states=states))
    register_policy_loss(name)(policy_loss)
    LOSSES.add(name)


def in_place_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """verl's function from rewards to advantages, which reads more of the batch for graphs than for others."""

    @functools.wraps(step)
    def stepped(data: Any, adv_estimator: Any, *args: Any, **given: Any) -> Any:
        estimator = ADV_ESTIMATOR_REGISTRY.get(adv_estimator)
        if not isinstance(estimator, Estimator) or "response_mask" not in data.batch:
            return step(data, adv_estimator, *args, **given)
        prompts = None
        if "prompts" in data.batch:  # padded on the left
            width = data.batch["prompts"].shape[1]
            rows = zip(data.batch["prompts"], data.batch["attention_mask"][:, :width], strict=True)
            prompts = [row[mask != 0].tolist() for row, mask in rows]
        # Agent Lightning's trainer, verl's with rows that are single requests, says here whose they are.
        of_rollouts = data.non_tensor_batch.get("rollout_id_list", ())
        outputs = [(str(rollout), i) for i, rollout in enumerate(of_rollouts)]
        more = {"tokens": data.batch.get("responses"), "prompts": prompts, "logprobs": _logprobs(data.batch)}
        more["answers"] = _answers(data.non_tensor_batch.get("reward_model"))
        if estimator.credit.scores and any(data.non_tensor_batch.get("multi_modal_inputs", ())):
            estimator.credit.refuse_images()
        return _credited(data, estimator, given.get("config"), more, outputs)

    return stepped


def by_sessions(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same of verl's V1 trainer, whose queue has the token ids, and whose sessions may have several outputs."""

    @functools.wraps(step)
    def stepped(data: Any, batch_keys: Sequence[str], adv_estimator: Any, *args: Any, **given: Any) -> Any:
        estimator = ADV_ESTIMATOR_REGISTRY.get(adv_estimator)
        if not isinstance(estimator, Estimator):
            return step(data, batch_keys, adv_estimator, *args, **given)
        import transfer_queue

        credit = estimator.credit
        more: dict[str, Any] = {"logprobs": _logprobs(data.batch)}
        if credit.reads("entropies"):
            kept = transfer_queue.kv_batch_get(keys=batch_keys, partition_id="train", select_fields=["entropy"])
            rows = kept.get("entropy", None)  # none with rollout_correction.bypass_mode
            more["entropies"] = (
                None if rows is None else Jagged.from_rows([row.tolist() for row in rows.unbind()]).to_padded()
            )
        if credit.reads_tokens:
            asked = ("multi_modal_inputs", "reward_model") if credit.scores else ()
            further = COLUMNS if isinstance(credit.verifier, VerlRewards) else ()
            fields = ["prompts", "responses", *dict.fromkeys((*asked, *further))]
            found = transfer_queue.kv_batch_get(keys=batch_keys, partition_id="train", select_fields=fields)
            more["prompts"] = [row.tolist() for row in found["prompts"].unbind()]
            responses = [row.tolist() for row in found["responses"].unbind()]
            more["tokens"] = Jagged.from_rows(responses, torch.int64).to_padded()
            more["answers"] = _answers(found.get("reward_model"))
            if asked and any(found.get("multi_modal_inputs").tolist()):
                credit.refuse_images()
            if isinstance(credit.verifier, VerlRewards):
                columns = zip(*(found.get(name).tolist() for name in COLUMNS), strict=True)
                rows = [dict(zip(COLUMNS, row, strict=True)) for row in columns]
                credit.verifier.keep(data.non_tensor_batch["uid"], rows)
        named = [key.rsplit("_", 1) for key in batch_keys]  # uid_session, place of the output in it
        outputs = [(session, int(place)) for session, place in named]
        return _credited(data, estimator, given.get("config"), more, outputs)

    return stepped


def with_model(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a trainer of verl, before which a graph is checked and gets the trainer's model."""

    @functools.wraps(step)
    def stepped(trainer: Any, *args: Any, **given: Any) -> Any:
        name = trainer.config.algorithm.adv_estimator
        estimator = ADV_ESTIMATOR_REGISTRY.get(name)
        if isinstance(estimator, Estimator):
            loss = trainer.config.actor_rollout_ref.actor.policy_loss.loss_mode
            estimator.credit.check_loss(loss in LOSSES, f"Set actor_rollout_ref.actor.policy_loss.loss_mode={name}.")
            attach(estimator, trainer)
        return step(trainer, *args, **given)

    return stepped


def _lend(name: str, step: str) -> Callable[[Any], None]:
    """Has a trainer lend its model to graphs, from a step on."""

    def change(module: Any) -> None:
        trainer = getattr(module, name)
        setattr(trainer, step, with_model(getattr(trainer, step)))

    return change


def _logprobs(batch: Any) -> Any:
    """Log-probs of the responses [N, T], of verl's old policy or of its rollouts; None where there are none."""
    return batch.get("old_log_probs", batch.get("rollout_log_probs"))


def _answers(given: Any) -> list[str] | None:
    """Reference answers, as verl's data has them; None without."""
    return None if given is None else reference_answers(entry.get("ground_truth") for entry in given.tolist())


def _credited(
    data: Any, estimator: Estimator, config: Any, more: dict[str, Any], outputs: Sequence[tuple[str, int]]
) -> Any:
    """verl's batch with the advantages of a graph.

    Args:
        more: of each row what the graph reads of it; None where it is not known.
        outputs: the session of each row and its place in it.
    """
    scores, mask, uid = data.batch["token_level_rewards"], data.batch["response_mask"], data.non_tensor_batch.get("uid")
    sessions: list[str] | None = None
    order = list(range(len(mask)))
    if len({session for session, _ in outputs}) < len(outputs):
        order.sort(key=lambda i: outputs[i])
        sessions = [outputs[i][0] for i in order]
        last = torch.tensor([one != other for one, other in pairwise([*sessions, None])])[:, None]
        # verl copies the score of the last output to the others; what is not a score, as a KL in the reward, is theirs.
        scores = scores.clone()
        scores[order] = scores[order].where(last, scores[order] - data.batch["token_level_scores"][order])
    rest: dict[str, Any] = {
        name: x[order] if isinstance(x, Tensor) else x and [x[i] for i in order] for name, x in more.items()
    }
    advantages, returns = estimator(
        scores[order],
        mask[order],
        None if uid is None else uid[order],
        None if "values" not in data.batch else data.batch["values"][order],
        episode=sessions,
        config=config,
        **rest,
    )
    back = torch.tensor(order).argsort()
    data.batch["advantages"], data.batch["returns"] = advantages[back], returns[back]
    return data


def of_whole_responses(loss: Callable[..., Any]) -> Callable[..., Any]:
    """verl's loss `geo_mean`, which averages the advantages of a response; refused where they differ within one."""

    @functools.wraps(loss)
    def checked(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *args: Any, **given: Any
    ) -> Any:
        if differs_within(advantages, response_mask != 0):
            raise ConfigError(
                "verl: loss_mode=geo_mean averages the advantages of a response, so credit within it would be lost; "
                "choose another loss_mode."
            )
        return loss(old_log_prob, log_prob, advantages, response_mask, *args, **given)

    return checked


def _wrap(function: str, wrapper: Callable[..., Any], modules: Sequence[str]) -> None:
    """In the module that has a function, when it is imported, and in those that have taken it from there."""

    def change(module: Any) -> None:
        setattr(module, function, wrapper(getattr(module, function)))

    # verl imports this module while it is imported itself, when its trainer with all that it needs is not.
    on_import(modules[0], change)
    for name in modules[1:]:
        if name in sys.modules:
            change(sys.modules[name])


_wrap(
    "compute_advantage",
    in_place_of,
    (f"{TRAINER}.ray_trainer", f"{TRAINER}.v1.utils", "verl.experimental.separation.ray_trainer"),
)
_wrap("compute_advantage_for_multi_trajectories", by_sessions, (f"{TRAINER}.v1.utils", f"{TRAINER}.v1.trainer_base"))
on_import(f"{TRAINER}.v1.trainer_base", _lend("PPOTrainer", "fit"))
on_import(f"{TRAINER}.ray_trainer", _lend("RayPPOTrainer", "fit"))
on_import("verl.experimental.separation.ray_trainer", _lend("SeparateRayPPOTrainer", "_fit_compute_advantage"))
POLICY_LOSS_REGISTRY["geo_mean"] = of_whole_responses(POLICY_LOSS_REGISTRY["geo_mean"])
check_version("verl", TESTED)
for _graph in graph_names():
    register(_graph)
