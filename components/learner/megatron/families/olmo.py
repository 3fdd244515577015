"""OLMo-2 and OLMo-3: post-norm layers, and query and key norms over all heads together."""

from typing import Any

import torch
from mbridge.core.llm_bridge import LLMBridge
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from creditgraph.components.learner.megatron.families.family import Family
from creditgraph.components.learner.megatron.layers.parts import Parts

LAYER = "model.layers.{layer_number}."


class OlmoBridge(LLMBridge):  # type: ignore[misc]
    """Tensor names of OLMo-2 and OLMo-3, which mbridge does not support."""

    _ATTENTION_MAPPING = {
        "self_attention.linear_proj.weight": [f"{LAYER}self_attn.o_proj.weight"],
        "self_attention.linear_proj.norm.weight": [f"{LAYER}post_attention_layernorm.weight"],
        "self_attention.q_layernorm.weight": [f"{LAYER}self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": [f"{LAYER}self_attn.k_norm.weight"],
        "self_attention.linear_qkv.weight": [f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"],
    }
    _MLP_MAPPING = {
        "mlp.linear_fc1.weight": [f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"],
        "mlp.linear_fc2.weight": [f"{LAYER}mlp.down_proj.weight"],
        "mlp.linear_fc2.norm.weight": [f"{LAYER}post_feedforward_layernorm.weight"],
    }

    def _build_config(self) -> Any:
        # Not qk_layernorm: megatron-core would sum the gradients of these norms, which are sharded like the heads, over
        # the ranks.
        return self._build_base_config()


def adapt(layer: Any, parts: Parts) -> None:
    """Turns a layer specification into OLMo's: no norm before a matrix, one after attention and after the MLP."""
    whole = layer.submodules
    attention = whole.self_attention.submodules
    mlp = whole.mlp.submodules
    whole.input_layernorm = whole.pre_mlp_layernorm = IdentityOp
    attention.linear_qkv = mlp.linear_fc1 = parts.column
    attention.q_layernorm = QueryNorm
    attention.k_layernorm = KeyNorm
    attention.linear_proj = mlp.linear_fc2 = parts.normed_row


class HeadsNorm(nn.Module):
    """RMS norm over all heads of a token together; weights and heads are sharded over the tensor-parallel ranks."""

    heads: str

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__()
        count = getattr(config, self.heads)
        self.width = count * hidden_size
        self.eps = eps
        weight = torch.empty(self.width // config.tensor_model_parallel_size, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads / TP, D], normalised."""
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        # Every rank's result depends on every rank's heads: a sum forward and a sum backward.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        return (normed * self.weight.float().view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Describes the sharded weight for distributed checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )


class QueryNorm(HeadsNorm):
    """RMS norm over the query heads."""

    heads = "num_attention_heads"


class KeyNorm(HeadsNorm):
    """RMS norm over the key heads."""

    heads = "num_query_groups"


# The norm over all key heads needs each of them on one rank only.
OLMO = Family(OlmoBridge, adapt, whole_key_heads=True)
