"""Settings of `learner.megatron`. Importing this file imports no megatron."""

import importlib.util
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from creditgraph.components.learner.settings import LearnerSettings
from creditgraph.pipeline.core.errors import extra
from creditgraph.pipeline.core.settings import SettingsError, check_fields

Recompute = Literal["none", "selective", "full"]
Kernel = Literal["auto", "torch", "flash", "cudnn"]

# What determines fields of TransformerConfig and DistributedDataParallelConfig (names, or patterns) that no user sets.
OWN_TRANSFORMER = {
    "the model's config.json": "num_layers mtp_* hidden_size num_attention_heads num_query_groups ffn_hidden_size "
    "kv_channels softmax_* hidden_dropout attention_dropout layernorm_epsilon layernorm_zero_centered_gamma "
    "add_bias_linear add_qkv_bias gated_linear_unit activation_func activation_func_clamp_value glu_linear_offset "
    "rotary_interleaved window_* normalization qk_* attention_output_gate multi_latent_attention no_rope_freq "
    "experimental_attention_variant dsa_* linear_* apply_residual_connection_post_layernorm mrope_section mamba_* "
    "apply_query_key_layer_scaling is_hybrid_model hetero* heter* num_moe_experts moe_ffn_hidden_size moe_layer_freq "
    "moe_router_topk moe_router_score_function moe_shared_expert_intermediate_size moe_latent_size",
    "the sizes of the layout, such as learner.tensor_parallel": "*_parallel_size *_parallel_sizes sequence_parallel "
    "hybrid_context_parallel pipeline_model_parallel_layout num_layers_in_* account_for_* max_seqlen_per_dp_cp_rank "
    "deallocate_pipeline_outputs",
    "learner.recompute": "recompute_* distribute_saved_activations",
    "learner.layers": "fp8 fp8_recipe fp8_wgrad tp_only_amax_red moe_grouped_gemm moe_permute_fusion",
    "model.dtype": "fp16 bf16 params_dtype pipeline_dtype autocast_dtype enable_autocast",
    "learner.megatron itself": "perform_initialization use_cpu_initialization *init_method* timers *_sync_func "
    "finalize_model_grads_func grad_scale_func calculate_per_token_loss variable_seq_lengths masked_softmax_fusion "
    "attention_backend transformer_impl cp_comm_type tp_comm_* overlap_p2p_comm batch_p2p_comm cross_entropy_* "
    "defer_embedding_wgrad_compute wgrad_deferral_limit *cuda_graph* init_model_with_meta_device quant_recipe "
    "inference_* use_inference_* flash_decode test_mode use_te_rng_tracker moe_token_dispatcher_type "
    "moe_router_pre_softmax moe_router_dtype moe_router_load_balancing_type moe_aux_loss_coeff _*",
}
OWN_DDP = {
    "learner.distributed_optimizer": "use_distributed_optimizer num_distributed_optimizer_instances",
    "learner.megatron itself": "grad_reduce_in_fp32 average_in_collective check_for_* use_*_fsdp fsdp_* "
    "data_parallel_sharding_strategy outer_dp_sharding_strategy preserve_fp32_weights "
    "suggested_communication_unit_size",
}
# Fast paths of TransformerConfig → the package, as it is imported, without which megatron-core refuses them.
FUSIONS = {
    "gradient_accumulation_fusion": "fused_weight_gradient_mlp_cuda",
    "apply_rope_fusion": "transformer_engine",
    "bias_activation_fusion": "torch",
}
SOURCES = {
    "fused_weight_gradient_mlp_cuda": "build NVIDIA Apex with --cpp_ext --cuda_ext",
    "transformer_engine": "pip install transformer-engine[pytorch]",
}


def fusions(device: str) -> dict[str, bool]:
    """The fast paths that are on by default: on CUDA, those whose package is installed."""
    cuda = device.startswith("cuda")
    return {name: cuda and importlib.util.find_spec(package) is not None for name, package in FUSIONS.items()}


def missing_fusions() -> dict[str, str]:
    """Fast paths that would be off on a GPU here → the next step."""
    return {name: SOURCES[FUSIONS[name]] for name, there in fusions("cuda").items() if not there}


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Numbers of ranks that share one model."""

    tensor_parallel: int = 1
    """ranks that each matrix is sharded over; must divide the attention heads"""
    pipeline_parallel: int = 1
    """ranks that the stack of layers is sharded over; if layers do not divide evenly, the first ranks have one more"""
    virtual_pipeline: int = 1
    """chunks of layers per pipeline rank: smaller bubbles, more communication"""
    context_parallel: int = 1
    """ranks that the tokens of a micro-batch are sharded over, for sequences too long for one device"""
    expert_parallel: int = 1
    """ranks that the experts of a layer are sharded over; they are tensor and context parallel ranks and replicas"""
    sequence_parallel: bool = False
    """shard activations between matrix products over the tensor-parallel ranks too: less memory"""

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel")
        small = [f"{name} {getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        if small:
            raise ValueError(f"expected at least 1 (1: not sharded), got {', '.join(small)}.")
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"virtual_pipeline {self.virtual_pipeline} interleaves pipeline stages, but pipeline_parallel is 1; "
                "set pipeline_parallel, or virtual_pipeline: 1."
            )
        ranks = self.tensor_parallel * self.context_parallel
        if self.expert_parallel % ranks and ranks % self.expert_parallel:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} does not fit tensor_parallel {self.tensor_parallel} × "
                f"context_parallel {self.context_parallel} = {ranks} ranks; expected a divisor of {ranks}, or a "
                "multiple to shard experts over several replicas."
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel shards activations over tensor-parallel ranks, but tensor_parallel is 1; set "
                "tensor_parallel, or sequence_parallel: false."
            )

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def stages(self, layers: int) -> list[int]:
        """Layers of each stage in order; where they do not divide evenly, the first have one more.

        The last stage also computes the output head.

        >>> ParallelLayout(pipeline_parallel=2).stages(3)
        [2, 1]
        """
        count = self.pipeline_parallel * self.virtual_pipeline
        return [layers // count + (i < layers % count) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Matrix products in 8 bits, by TransformerEngine; parameters, attention and output head stay as they are."""

    recipe: Literal["off", "delayed", "tensorwise", "blockwise", "mxfp8"] = "off"
    """how tensors are scaled to 8 bits: delayed, one factor per tensor, from earlier steps; tensorwise, one per tensor,
    from itself; blockwise, one per 128 numbers or 128 × 128 weights (Hopper); mxfp8, one per 32 numbers (Blackwell)"""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: e4m3 forward, e5m2 with its larger range for gradients; e4m3: for both"""

    @property
    def token_multiple(self) -> int:
        """Tokens, and widths of matrices, come in multiples of this: one block, or the tile of an 8-bit product."""
        return {"off": 1, "blockwise": 128, "mxfp8": 32}.get(self.recipe, 16)


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """The library that computes the layers of the model, and its precision."""

    library: Literal["auto", "local", "transformer_engine"] = "auto"
    """matrices and norms: local, megatron-core's own; transformer_engine, its fused norms and matrices, on GPUs; auto,
    TransformerEngine on a GPU where it is installed"""
    attention: Kernel = "auto"
    """kernel on a GPU: torch, its flash attention; flash and cudnn, TransformerEngine's FlashAttention (version 3 where
    installed) and cuDNN; auto, the fastest of those that are installed, measured at the start"""
    fp8: Fp8 = field(default_factory=Fp8)
    """matrix products in 8 bits, with TransformerEngine's layers on GPUs of compute capability 8.9 and newer"""


@dataclass(frozen=True, kw_only=True)
class MegatronSettings(LearnerSettings, ParallelLayout):
    """Settings of `learner.megatron`: those of every learner, how the model is sharded, and what its layers are."""

    layers: LayerSettings = field(default_factory=LayerSettings)
    """library, attention kernel and 8-bit products of the layers"""

    recompute: Recompute = "none"
    """activations computed again in the backward pass: none; selective, attention scores; full, all but the layers'
    inputs: least memory, about a third more time"""
    distributed_optimizer: Literal["auto", "on", "off"] = "auto"
    """shard float32 weights and moments over replicas; auto: on GPUs when there are several replicas"""
    transformer: dict[str, Any] = field(default_factory=dict)
    """fields of megatron-core's TransformerConfig that neither the model nor another setting determines, by name"""
    ddp: dict[str, Any] = field(default_factory=dict)
    """fields of megatron-core's DistributedDataParallelConfig, such as overlap_grad_reduce (by default on for GPUs with
    several replicas) and overlap_param_gather (if, besides, a batch has several steps: weights are whole after each
    batch)"""

    def __post_init__(self) -> None:
        LearnerSettings.__post_init__(self)
        ParallelLayout.__post_init__(self)
        if self.transformer or self.ddp:
            self._check_fields()

    def _check_fields(self) -> None:
        with extra("megatron", "learner.transformer, learner.ddp"):
            from megatron.core.distributed import DistributedDataParallelConfig
            from megatron.core.transformer.transformer_config import TransformerConfig
        found = []
        for place, config, own in (
            ("transformer", TransformerConfig, OWN_TRANSFORMER),
            ("ddp", DistributedDataParallelConfig, OWN_DDP),
        ):
            values = getattr(self, place)
            owned = {name: _owner(name, own) for name in values}
            found += [f"{place}.{n}: {owner} determines it; remove it." for n, owner in owned.items() if owner]
            free = {name: value for name, value in values.items() if not owned[name]}
            converted, problems = check_fields(config, free, place)
            found += problems
            object.__setattr__(self, place, converted)
        if self.ddp.get("overlap_param_gather") and self.distributed_optimizer != "on":
            found.append(
                "ddp.overlap_param_gather: gathers the weights that the distributed optimizer shards; set "
                "learner.distributed_optimizer=on."
            )
        if found:
            raise SettingsError(found)


def _owner(name: str, own: dict[str, str]) -> str:
    """What determines a field; "" for one that is free."""
    owners = [owner for owner, names in own.items() if any(fnmatchcase(name, pattern) for pattern in names.split())]
    return owners[0] if owners else ""
