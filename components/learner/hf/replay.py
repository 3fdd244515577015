"""Router replay: a transformers model computes with the experts that an engine chose."""

import re
from functools import partial
from typing import Any

from torch import Tensor, where

from creditgraph.components.learner.packing.pack import PackedBatch
from creditgraph.pipeline.core.errors import ConfigError


class Replay:
    """Has the routers of a model choose given experts, weighted by their own probabilities, through which gradients go.

    Args:
        model: a transformers causal LM.
    """

    def __init__(self, model: Any) -> None:
        self._name = type(model).__name__
        self._experts: Tensor | None = None
        # Softmax over all experts; others have biases or groups.
        routers = {n: m for n, m in model.named_modules() if type(m).__name__.endswith("TopKRouter")}
        self._known = bool(routers) and all(hasattr(m, "norm_topk_prob") for m in routers.values())
        for name, router in routers.items() if self._known else ():
            layer = re.search(r"\blayers\.(\d+)\.", name)
            assert layer is not None, name
            router.register_forward_hook(partial(self._choose, int(layer[1])))

    def use(self, batch: PackedBatch, packs: bool) -> None:
        """The experts of the next passes, of `batch.experts`; ConfigError where the model cannot replay them."""
        if batch.experts is not None and not (self._known and packs):
            raise ConfigError(
                f"learner.hf: expected a packed model whose routers are softmax over all experts, as Qwen3-MoE and "
                f"OLMoE, to replay the engine's experts, got {self._name}. Set engine.return_routed_experts=false."
            )
        self._experts = None if batch.experts is None else batch.experts.to(batch.input_ids.device)

    def _choose(self, layer: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if self._experts is None:
            return None
        logits, scores, chosen = output
        width = chosen.shape[1]
        given = self._experts[:, layer * width : (layer + 1) * width].to(chosen.dtype)
        chosen = where(given < 0, chosen, given)
        weights = logits.float().softmax(-1).gather(1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(scores.dtype), chosen
