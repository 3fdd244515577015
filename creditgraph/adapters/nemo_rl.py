"""Credit graphs in NeMo-RL, whose estimators have fixed names: in the script that starts training, before `grpo_train`,

    import nemo_rl.algorithms.grpo
    from creditgraph.adapters.nemo_rl import Estimator

    nemo_rl.algorithms.grpo.GRPOAdvantageEstimator = Estimator

Its settings then name the graph:

    grpo:
      adv_estimator: {name: grpo, graph: gigpo, overrides: [advantage.omega=0.5]}

NeMo-RL passes rewards, the prompts, the mask of the sampled tokens and the messages with their token ids, no values.
Its loss takes no function of one's own. Run by hand with NeMo-RL at commit 7ea279abf, which no package index has.
"""

from typing import Any

import torch
from torch import Tensor

from creditgraph.adapters.estimator import settings_of
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.pipeline.core.errors import ConfigError

SEQUENCE_LEVEL = "sequence_level_importance_ratios"


class Estimator:
    """A graph in the place of NeMo-RL's estimator "grpo"."""

    def __init__(self, estimator_config: Any, loss_config: Any = None) -> None:
        graph = getattr(estimator_config, "graph", None)
        if not graph:
            raise ConfigError("NeMo-RL: no graph is chosen; set grpo.adv_estimator.graph, to grpo or another graph.")
        self.credit = CreditGraph(graph, *settings_of(getattr(estimator_config, "overrides", None)))
        self.credit.check_given(values=False)
        self.credit.check_loss(False)
        self.by_response = getattr(loss_config, SEQUENCE_LEVEL, False)

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, repeated_batch: Any, **given: Any
    ) -> Tensor:
        """Advantages, float32 [N, T] like the mask.

        Args:
            prompt_ids: [N, L], padded token ids of the prompts; rows of the same prompt are compared.
            rewards: [N].
            mask: [N, T] over prompt and response, not 0 where the policy sampled the token.
            repeated_batch: with the messages of each row and their token ids under "message_log"; without them, as in
                `grpo_sync`, states of turns after the first are unknown.
            given: what other estimators read.
        """
        tokens = None
        if "message_log" in repeated_batch:
            tokens = torch.zeros(mask.shape, dtype=torch.int64)
            for row, messages in zip(tokens, repeated_batch["message_log"], strict=True):
                ids = torch.cat([message["token_ids"] for message in messages])
                row[: len(ids)] = ids
        group = [tuple(row) for row in prompt_ids.tolist()]
        rollouts = Rollouts(mask=mask, rewards=rewards, group=group, tokens=tokens)
        return self.credit(rollouts, by_response=f"{SEQUENCE_LEVEL}=true" if self.by_response else "")
