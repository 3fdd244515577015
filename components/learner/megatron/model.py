"""Hugging Face causal LMs as megatron-core GPTModels, sharded over tensor, pipeline and context parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.nn import functional

from creditgraph.components.learner.head import HeadPlan
from creditgraph.components.learner.logprobs import Head, VocabShard, token_logprobs
from creditgraph.components.learner.lora import Lora
from creditgraph.components.learner.megatron.attention import PackedParams, RankInputs, prepare
from creditgraph.components.learner.megatron.bridge import build_chunks, make_bridge
from creditgraph.components.learner.megatron.cpu import megatron_on_cpu
from creditgraph.components.learner.megatron.experts import attach_replays, local_expert
from creditgraph.components.learner.megatron.layers.fp8 import check_fp8, fp8_fields
from creditgraph.components.learner.megatron.layers.parts import LOCAL, chosen_parts
from creditgraph.components.learner.megatron.lora import Adapters, check_lora
from creditgraph.components.learner.megatron.parallel import check_layout
from creditgraph.components.learner.megatron.settings import LayerSettings, ParallelLayout, Recompute, fusions
from creditgraph.components.learner.megatron.weights import check_files, fill, gather, parts, read
from creditgraph.components.learner.packing.pack import PackedBatch
from creditgraph.components.models.load import load_config
from creditgraph.components.models.weights import tensor_files
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.jagged import Jagged

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # Attention scores only: little time, and the one activation that grows with the square of the length where no flash
    # kernel runs.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    # Every layer keeps only its input: least memory, about a third more time.
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class MegatronModel:
    """This rank's part of a model.

    Attributes:
        chunks: GPTModels of this rank, one per virtual pipeline stage.
        transformer_config: megatron-core's TransformerConfig.
        vocab_size: true vocabulary; the embedding is padded beyond it.
        layout: how the model is sharded.
        head_plan: chunks and precision of the output head.
        adapters: the adapters, if it has any.
    """

    def __init__(self, layout: ParallelLayout, bridge: Any, chunks: list[Any], token_multiple: int = 1) -> None:
        self.layout = layout
        self._token_multiple = token_multiple
        self.bridge = bridge
        self.chunks = chunks
        self.transformer_config = bridge.config
        self.vocab_size: int = bridge.vocab_size
        self.head_plan = HeadPlan()
        self.adapters: Adapters | None = None
        self._replays = {id(chunk): attach_replays(chunk) for chunk in chunks}
        # With virtual stages each chunk requests the same batch again.
        self._inputs: WeakKeyDictionary[PackedBatch, RankInputs] = WeakKeyDictionary()

    @staticmethod
    def build(
        path: str,
        layout: ParallelLayout,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
        device: str | torch.device = "cpu",
        hf_config: Any = None,
        layers: LayerSettings | None = None,
        transformer: Mapping[str, Any] | None = None,
        lora: Lora | None = None,
    ) -> MegatronModel:
        """A model with undefined weights, which `load` fills. Call `init_parallel` first.

        Args:
            path: model folder, hub name or "tiny".
            layout: that of `init_parallel`.
            dtype: dtype of the parameters.
            recompute: activations recomputed in the backward pass.
            device: device of the parameters.
            hf_config: a transformers configuration to use instead of the one at `path`.
            layers: the library that computes them.
            transformer: further fields of TransformerConfig.
            lora: adapters that `adapt` will attach; they need layers whose norms are not fused with the next matrix.
        """
        hf_config = load_config(ModelSpec(path=path)) if hf_config is None else hf_config
        check_layout(layout, hf_config, path)
        device = torch.device(device)
        layers = layers or LayerSettings()
        adapts = lora is not None and lora.rank > 0
        # Adapters need norms of their own, which TransformerEngine fuses with the next matrix.
        of_library = LOCAL if adapts else chosen_parts(layers, device)
        check_fp8(layers.fp8, of_library, dtype, layout, hf_config)
        settings = {
            "sequence_parallel": layout.sequence_parallel,
            "use_cpu_initialization": device.type == "cpu",
            # Weights come from a checkpoint.
            "init_method": _leave,
            "output_layer_init_method": _leave,
            "embedding_init_method": _leave,
            # Its kernel would ignore the layout of packed sequences.
            "masked_softmax_fusion": False,
            "params_dtype": dtype,
            **_uneven(layout.stages(hf_config.num_hidden_layers)),
            **RECOMPUTE[recompute],
            # The interleaved schedule frees an output before its asynchronous send has completed.
            "deallocate_pipeline_outputs": layout.virtual_pipeline == 1,
            **fusions(device.type),
            **fp8_fields(layers.fp8),
            **(transformer or {}),
        }
        with megatron_on_cpu():
            bridge = make_bridge(hf_config, dtype, layout.tensor_parallel, settings)
            if lora is not None and adapts:
                check_lora(lora, layout, bridge)
            chunks = build_chunks(bridge, layout.virtual_pipeline, of_library)
            for chunk in chunks:
                chunk.to(device)
                _mark(chunk)
        return MegatronModel(layout, bridge, chunks, layers.fp8.token_multiple)

    def load(self, path: str) -> None:
        """Reads this rank's part of a safetensors checkpoint, one tensor at a time.

        Raises DataError for a checkpoint of another architecture, a truncated file, and missing or surplus tensors;
        every rank reads for itself, so no rank waits for one that failed.
        """
        own = parts(self.bridge, self.chunks)
        files = tensor_files(path)
        check_files(path, files, self.bridge.shapes)
        with megatron_on_cpu():
            fill(self.bridge, own, read(own, files))

    def adapt(self, lora: Lora, seed: int) -> None:
        """Freezes the weights, which are loaded, and attaches adapters."""
        with megatron_on_cpu():
            self.adapters = Adapters(self.bridge, self.chunks, lora, seed)
            for chunk in self.chunks:
                _mark(chunk)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in Hugging Face names, one at a time, on every rank; all ranks iterate. Adapters are merged."""
        tensors = gather(self.bridge, parts(self.bridge, self.chunks))
        return tensors if self.adapters is None else self.adapters.merged(tensors, self.adapters.whole())

    def forward(self, chunk: Any, batch: PackedBatch) -> Tensor:
        """Hidden states [s, 1, D] of one chunk, bare or wrapped in DDP; after the final norm on the last stage.

        s is this rank's share of the tokens, padded to whole shares. Call `logprobs` with the last stage's result.
        """
        inputs = self.inputs(batch)
        self._replay(getattr(chunk, "module", chunk), batch, inputs)
        hidden: Tensor = chunk(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=None,
            packed_seq_params=PackedParams(layout=inputs.layout),
        )
        return hidden

    def _replay(self, chunk: Any, batch: PackedBatch, inputs: RankInputs) -> None:
        """Gives the routers of a chunk the experts of this rank's tokens."""
        config, mpu = self.transformer_config, self.bridge.mpu
        experts = batch.experts
        if experts is not None:
            if config.moe_router_fusion:
                raise ConfigError(
                    "learner.transformer.moe_router_fusion: expected false, because the fused router cannot replay the "
                    "engine's experts, got true. Set it to false, or engine.return_routed_experts=false."
                )
            padding = inputs.input_ids.shape[1] - len(inputs.places)
            experts = functional.pad(experts.to(inputs.places.device)[inputs.places], (0, 0, 0, padding), value=-1)
            if self.layout.sequence_parallel:
                experts = experts.chunk(self.layout.tensor_parallel)[mpu.tp_rank]
        recomputed = config.recompute_granularity == "full" or "moe" in (config.recompute_modules or ())
        for layer, replay in self._replays[id(chunk)].items():
            of_layer = slice(layer * config.moe_router_topk, (layer + 1) * config.moe_router_topk)
            replay.give(None if experts is None else experts[:, of_layer], recomputed and torch.is_grad_enabled())

    def inputs(self, batch: PackedBatch) -> RankInputs:
        """The input of this rank's chunks for a batch."""
        if batch not in self._inputs:
            shares = self.layout.tensor_parallel if self.layout.sequence_parallel else 1
            shares *= self._token_multiple  # 8-bit products need whole tiles of tokens
            self._inputs[batch] = prepare(batch, shares, self.layout.context_parallel, self.bridge.mpu.cp_rank)
        return self._inputs[batch]

    def head_weight(self) -> Tensor:
        """This rank's rows of the output head, [padded vocabulary / TP, D]; on the last stage only."""
        chunk = self.chunks[-1]
        # The layer is not called, so what runs before a call, the end of an overlapped gather of weights, runs here.
        for hook in list(chunk.output_layer._forward_pre_hooks.values()):
            hook(chunk.output_layer, ())
        shared = chunk.share_embeddings_and_output_weights
        weight: Tensor = chunk.shared_embedding_or_output_weight() if shared else chunk.output_layer.weight
        return weight

    def _head(self) -> Head:
        weight = self.head_weight()
        start = self.bridge.mpu.tp_rank * len(weight)
        shard = VocabShard(
            start=start,
            size=min(max(self.vocab_size - start, 0), len(weight)),
            group=self.bridge.mpu.tp_group,
            reduce_hidden=not self.layout.sequence_parallel,
        )
        return Head(weight=weight, shard=shard)

    def logprobs(self, hidden: Tensor, batch: PackedBatch, temperature: float = 1.0) -> tuple[Jagged, Jagged]:
        """On the last stage: log-probs and entropies of the batch's response tokens, float32, with gradient.

        They are whole on every tensor-parallel and context-parallel rank; each context-parallel rank's gradient is that
        of its own tokens, to be summed over them like data-parallel ones.

        Args:
            hidden: [s, 1, D] from `forward`.
            batch: the batch it was made from.
            temperature: above 0.
        """
        with megatron_on_cpu():
            if self.layout.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(
                    hidden, tensor_parallel_output_grad=True, group=self.bridge.mpu.tp_group
                )
            hidden = hidden.flatten(0, 1)
            if self.layout.context_parallel > 1:
                return batch.by_row(*self._of_all_contexts(hidden, batch, temperature))
            # Padding to whole shares is at the end, and predicts nothing.
            chosen = batch.predicting(hidden[: batch.tokens])
            return batch.by_row(*self._token_logprobs(chosen, batch.next_tokens, temperature))

    def _token_logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        plan = self.head_plan
        return token_logprobs(hidden, targets, self._head(), temperature, plan.chunk, plan.wide)

    def _of_all_contexts(self, hidden: Tensor, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all pairs, each computed by the context-parallel rank whose token predicts it."""
        places = self.inputs(batch).places
        slots = places.new_full((batch.tokens,), -1)
        slots[places] = torch.arange(len(places), device=places.device)
        slots = slots[batch.predict]
        own = (slots >= 0).nonzero(as_tuple=True)[0]
        chosen = hidden.index_select(0, slots[own])
        values = self._token_logprobs(chosen, batch.next_tokens[own], temperature)
        # Forward a sum over the ranks' disjoint parts, backward the identity.
        logprobs, entropies = (
            reduce_from_tensor_model_parallel_region(
                x.new_zeros(len(batch.predict), *x.shape[1:]).index_copy(0, own, x), group=self.bridge.mpu.cp_group
            )
            for x in values
        )
        return logprobs, entropies


def _uneven(stages: list[int]) -> dict[str, Any]:
    if min(stages) == max(stages):
        return {}
    rows = [["decoder"] * count for count in stages]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return {"pipeline_model_parallel_layout": rows}


def _leave(tensor: Tensor) -> Tensor:
    return tensor


def _mark(chunk: Any) -> None:
    # Gradient norm and optimiser read these attributes of every parameter.
    for name, parameter in chunk.named_parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if local_expert(name):
            # Summed over the ranks with the same expert, also where expert_parallel is 1.
            parameter.allreduce = False
