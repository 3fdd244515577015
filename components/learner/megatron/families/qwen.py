"""Qwen2, Qwen2.5 and Qwen3, dense and with experts."""

from typing import Any

from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge

from creditgraph.components.learner.megatron.experts import expert_settings
from creditgraph.components.learner.megatron.families.family import Family

LAYER = "model.layers.{layer_number}.mlp."


class ExpertsBridge(Qwen3MoEBridge):  # type: ignore[misc]
    """Names of dense layers beside those with experts, and the router as transformers computes it."""

    _MLP_MAPPING = {
        **LLMBridge._MLP_MAPPING,
        "mlp.router.weight": [f"{LAYER}gate.weight"],
        "mlp.experts.linear_fc1": [f"{LAYER}experts.{{expert_id}}.{x}_proj.weight" for x in ("gate", "up")],
        "mlp.experts.linear_fc2": [f"{LAYER}experts.{{expert_id}}.down_proj.weight"],
    }

    def _build_config(self) -> Any:
        return self._build_base_config(**expert_settings(self.hf_config))


QWEN2 = Family(Qwen2Bridge)
QWEN3 = Family(Qwen3Bridge)
QWEN3_MOE = Family(ExpertsBridge)
