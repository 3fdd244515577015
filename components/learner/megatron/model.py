"""Hugging Face causal LMs as megatron-core GPTModels, cut over tensor, pipeline and context parallel ranks.

Importing this file imports no megatron; building a model does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from components.learner.megatron.cpu import megatron_on_cpu
from components.learner.megatron.head import vocab_parallel_logprobs
from components.learner.packing.attention import Gather
from components.learner.packing.pack import PackedBatch
from components.models.load import load_config, resolve_model_path
from pipeline.core.component import ModelSpec
from pipeline.core.errors import DataError
from pipeline.core.jagged import Jagged

SUPPORTED = ("qwen2", "qwen3", "llama", "olmo2", "olmo3")
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # Attention scores only: little time, and the one activation that grows with the square of the length where no flash
    # kernel runs.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    # Every layer keeps its input only: least memory, about a third more time.
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks share one model."""

    tensor: int = 1
    """ranks that cut each matrix (tensor parallel)"""
    pipeline: int = 1
    """ranks that cut the stack of layers (pipeline parallel)"""
    virtual_pipeline: int = 1
    """chunks of layers per pipeline rank; above 1 the schedule is interleaved"""
    context: int = 1
    """ranks that cut the tokens of a micro-batch (context parallel)"""
    sequence: bool = False
    """cut activations between matrix products over the tensor-parallel ranks too (sequence parallel)"""
    expert: int = 1
    """ranks that cut the experts of a mixture (expert parallel); 1, as the supported models are dense"""

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline * self.context

    def check(self, config: Any, world: int, path: str = "") -> None:
        """Raises ConfigError with every reason why a model of this transformers configuration cannot be cut so over `world` ranks.

        The vocabulary is never a reason: it is padded.
        """
        with _quiet():
            from components.learner.megatron.bridge import check_architecture, unsupported

        problems = self._counts(world) + (check_architecture(config, SUPPORTED) or self._cuts(config))
        if problems:
            raise unsupported(
                path or getattr(config, "_name_or_path", "") or getattr(config, "model_type", "?"), problems
            )

    def _counts(self, world: int) -> list[str]:
        sizes = (self.tensor, self.pipeline, self.virtual_pipeline, self.context, self.expert)
        if min(sizes) < 1:
            return [f"layout {sizes} has a size below 1; wanted at least 1 each"]
        out = []
        if world % self.model_size:
            out.append(
                f"{world} ranks cannot be cut into replicas of tensor_parallel {self.tensor} × pipeline_parallel "
                f"{self.pipeline} × "
                f"context_parallel {self.context} = {self.model_size}; wanted a multiple. Start {self.model_size} "
                "ranks or "
                f"{2 * self.model_size}, or lower one of the three"
            )
        if self.sequence and self.tensor == 1:
            out.append(
                "sequence_parallel cuts activations over tensor-parallel ranks, but tensor_parallel is 1; set it to "
                "false"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            out.append(
                f"virtual_pipeline {self.virtual_pipeline} interleaves pipeline stages, but pipeline_parallel is 1; "
                "set it to 1"
            )
        if self.expert > 1:
            out.append(
                f"expert_parallel {self.expert} cuts experts of a mixture, but the supported models are dense; set it "
                "to 1"
            )
        return out

    def _cuts(self, config: Any) -> list[str]:
        tp, out = self.tensor, []
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        works = [
            n for n in _divisors(heads) if (groups % n == 0 or n % groups == 0) and config.intermediate_size % n == 0
        ]
        if config.model_type.startswith("olmo"):  # its norm over all key heads needs each of them on one rank only
            works = [n for n in works if groups % n == 0]
        if tp not in works:
            out.append(
                f"tensor_parallel {tp} does not fit {heads} attention heads, {groups} key-value heads and MLPs of "
                f"{config.intermediate_size}; it must divide the first and the last, and divide or be a multiple of "
                "the second. "
                f"These work: {', '.join(map(str, works))}"
            )
        stages, layers = self.pipeline * self.virtual_pipeline, config.num_hidden_layers
        if layers < stages:
            what = f"pipeline_parallel {self.pipeline}"
            what += f" × virtual_pipeline {self.virtual_pipeline} = {stages}" if self.virtual_pipeline > 1 else ""
            out.append(
                f"{what} stages, but the model has {layers} layers; wanted at most {layers} stages, at least one layer "
                "in each"
            )
        return out

    def stages(self, layers: int) -> list[int]:
        """Layers of each stage in order; where they do not divide evenly, the first stages have one more (the last has the head).

        >>> Layout(pipeline=2).stages(3)
        [2, 1]
        """
        count = self.pipeline * self.virtual_pipeline
        return [layers // count + (i < layers % count) for i in range(count)]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# The layout whose groups exist, and the world they are part of.
_PRESENT: list[Any] = []


def init_parallel(layout: Layout, seed: int = 0) -> None:
    """megatron-core's process groups over the present torch.distributed world; a second call with another layout replaces them.

    The ranks of a replica are neighbours: replica = rank // layout.model_size.
    """
    with _quiet():
        from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        # A run of one process starts no group, and megatron-core wants one.
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    world = (layout, dist.group.WORLD)
    if parallel_state.is_initialized() and _PRESENT and _PRESENT[0] == world:
        return
    destroy()
    _PRESENT.append(world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        # Replicas of experts must number those of the rest of the model when replicas are outermost.
        expert_tensor_parallel_size=layout.tensor * layout.context,
        order="tp-cp-ep-pp-dp",
        # A second set of groups for CPU tensors, which the first already carries without CUDA.
        create_gloo_process_groups=torch.cuda.is_available(),
    )
    # Nothing here draws from these streams (no dropout, weights are loaded), but megatron-core wants them to exist. On
    # a CPU its "CUDA" generator is the default one, which is left as it was.
    keep = contextlib.nullcontext() if torch.cuda.is_available() else torch.random.fork_rng(devices=[])
    with megatron_on_cpu(), keep:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy() -> None:
    """Forgets the groups of `init_parallel`, if any."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        groups = [g for g in parallel_state._global_process_group_list or [] if g is not None]
        parallel_state.destroy_model_parallel()
        # megatron-core only forgets them; each gloo group keeps threads and sockets.
        for group in groups:
            dist.destroy_process_group(group)
    _PRESENT.clear()


class MegatronModel:
    """This rank's part of a model.

    Attributes:
        chunks: GPTModels of this rank, one per virtual pipeline stage.
        transformer_config: megatron-core's TransformerConfig.
        hf_config: transformers' configuration.
        vocab_size: true vocabulary; the embedding is padded beyond it.
        layout: how the model is cut.
    """

    def __init__(self, path: str, layout: Layout, hf_config: Any, bridge: Any, chunks: list[Any]) -> None:
        self.path, self.layout, self.hf_config, self.bridge, self.chunks = path, layout, hf_config, bridge, chunks
        self.transformer_config = bridge.config
        self.vocab_size: int = bridge.vocab_size
        # With virtual stages each chunk asks again for the same batch.
        self._inputs: WeakKeyDictionary[PackedBatch, Any] = WeakKeyDictionary()

    @staticmethod
    def build(
        path: str,
        layout: Layout,
        dtype: torch.dtype = torch.float32,
        recompute: str = "none",
        device: str | torch.device = "cpu",
        hf_config: Any = None,
    ) -> MegatronModel:
        """A model with undefined weights; `load` or `load_tensors` fills them. `init_parallel` comes first.

        Args:
            path: model folder, hub name or "tiny".
            layout: that of `init_parallel`.
            dtype: of the parameters.
            recompute: activations recomputed in the backward pass: "none", "selective" or "full".
            device: of the parameters.
            hf_config: a transformers configuration to use in place of the one at `path`.
        """
        from components.learner.megatron.bridge import build_chunks, make_bridge

        hf_config = load_config(ModelSpec(path=path)) if hf_config is None else hf_config
        layout.check(hf_config, dist.get_world_size(), path)
        if recompute not in RECOMPUTE:
            raise ValueError(f"learner.megatron: recompute is '{recompute}'; wanted one of {', '.join(RECOMPUTE)}.")
        device = torch.device(device)
        settings = {
            "sequence_parallel": layout.sequence,
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
        }
        with megatron_on_cpu(), _quiet():
            bridge = make_bridge(hf_config, dtype, layout.tensor, settings)
            chunks = build_chunks(bridge, layout.virtual_pipeline, _transformer_engine(device))
            for chunk in chunks:
                chunk.to(device)
                _mark(chunk)
        return MegatronModel(path, layout, hf_config, bridge, chunks)

    def load(self, path: str) -> None:
        """Reads this rank's part of a safetensors checkpoint, one tensor at a time.

        Raises DataError for a checkpoint of another architecture, a truncated file, and missing or surplus tensors;
        every rank reads for itself, so no rank waits for one that failed.
        """
        from components.learner.megatron.bridge import expected, fill, parts

        own = parts(self.bridge, self.chunks)
        files = tensor_files(path)
        place = f"model folder {path}"
        _check_tensors(place, files, expected(self.bridge, own))
        wanted = sorted(
            {source for part in own for source in part.sources}, key=lambda name: (str(files[name][0]), name)
        )
        with megatron_on_cpu():
            fill(self.bridge, own, _read(wanted, files))

    def load_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Takes this rank's part of whole tensors in Hugging Face names, in any order; DataError when one is missing."""
        from components.learner.megatron.bridge import fill, parts

        with megatron_on_cpu():
            fill(self.bridge, parts(self.bridge, self.chunks), tensors)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in Hugging Face names, one at a time, the same on every rank. Collective: all ranks of a replica iterate."""
        from components.learner.megatron.bridge import gather, parts

        return gather(self.bridge, parts(self.bridge, self.chunks))

    def forward(self, chunk: Any, batch: PackedBatch) -> Tensor:
        """One chunk (bare or wrapped in DDP) on a packed batch: hidden states [s, 1, D], after the final norm on the last stage.

        s is this rank's share of the tokens, padded to whole shares. Call `logprobs` with the last stage's result.
        """
        from components.learner.megatron.attention import PackedParams

        inputs = self.inputs(batch)
        hidden: Tensor = chunk(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=None,
            packed_seq_params=PackedParams(layout=inputs.layout),
        )
        return hidden

    def inputs(self, batch: PackedBatch) -> Any:
        """What this rank feeds its chunks for a batch (see attention.Inputs)."""
        from components.learner.megatron.attention import prepare

        if batch not in self._inputs:
            shares = self.layout.tensor if self.layout.sequence else 1
            self._inputs[batch] = prepare(batch, shares, self.layout.context, self.bridge.mpu.cp_rank)
        return self._inputs[batch]

    @property
    def is_last(self) -> bool:
        """Whether this rank's last chunk ends the model."""
        return bool(self.chunks[-1].post_process)

    def head_weight(self) -> Tensor:
        """This rank's rows of the output head, [padded vocabulary / TP, D]; on the last stage only."""
        chunk = self.chunks[-1]
        shared = chunk.share_embeddings_and_output_weights
        weight: Tensor = chunk.shared_embedding_or_output_weight() if shared else chunk.output_layer.weight
        return weight

    def logprobs(
        self, hidden: Tensor, batch: PackedBatch, temperature: float = 1.0, chunk: int = 0
    ) -> tuple[Jagged, Jagged]:
        """On the last stage: log-probs and entropies of the batch's response tokens, float32, with gradient.

        They are whole on every tensor-parallel and context-parallel rank; each context-parallel rank's gradient is that
        of its own tokens, to be summed over them like data-parallel ones.

        Args:
            hidden: [s, 1, D] from `forward`.
            batch: the batch it was made from.
            temperature: above 0.
            chunk: tokens per chunk of logits; 0 takes the device's default.
        """
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        with megatron_on_cpu():
            if self.layout.sequence:
                hidden = gather_from_sequence_parallel_region(
                    hidden, tensor_parallel_output_grad=True, group=self.bridge.mpu.tp_group
                )
            hidden = hidden.flatten(0, 1)
            own = self._own_pairs(batch)
            if own is None and batch.bags is not None and len(hidden) == len(batch.bags[1]):
                gather: Any = Gather.apply
                chosen = gather(hidden, batch.predict, *batch.bags)
            else:
                chosen = hidden.index_select(
                    0, batch.predict if own is None else batch.predict[own] - self.inputs(batch).start
                )
            weight = self.head_weight()
            found = vocab_parallel_logprobs(
                chosen,
                weight,
                batch.wanted if own is None else batch.wanted[own],
                vocab_start=self.bridge.mpu.tp_rank * weight.shape[0],
                true_vocab=self.vocab_size,
                temperature=temperature,
                group=self.bridge.mpu.tp_group,
                reduce_hidden=not self.layout.sequence,
                chunk=chunk,
            )
            pairs = found if own is None else tuple(self._whole(x, own, len(batch.wanted)) for x in found)
        if batch.spread is not None:
            pairs = tuple(x.index_select(0, batch.spread) for x in pairs)
        return batch.targets.with_values(pairs[0]), batch.targets.with_values(pairs[1])

    def _own_pairs(self, batch: PackedBatch) -> Tensor | None:
        """Pairs predicted by this context-parallel rank's tokens; None without context parallel."""
        if self.layout.context == 1:
            return None
        inputs = self.inputs(batch)
        inside: Tensor = (batch.predict >= inputs.start) & (batch.predict < inputs.stop)
        return inside.nonzero(as_tuple=True)[0]

    def _whole(self, values: Tensor, own: Tensor, count: int) -> Tensor:
        from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

        # Forward a sum over the ranks' disjoint parts, backward the identity.
        whole = values.new_zeros(count).index_copy(0, own, values)
        out: Tensor = reduce_from_tensor_model_parallel_region(whole, group=self.bridge.mpu.cp_group)
        return out


def tensor_files(path: str) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Tensor name → safetensors file and shape, from the files' headers; DataError when there is none, or one is truncated or missing."""
    from safetensors import SafetensorError, safe_open

    folder = Path(resolve_model_path(path))
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.safetensors.index.json"]))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"model folder {folder}: no *.safetensors; wanted weights in that format. Convert them with "
            "save_pretrained."
        )
    out: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                out.update({name: (file, tuple(opened.get_slice(name).get_shape())) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"weights {file}: cannot be read ({error}); wanted a whole safetensors file. Copy or download it again."
            ) from error
    return out


def _read(names: list[str], files: dict[str, tuple[Path, tuple[int, ...]]]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in sorted({files[name][0] for name in names}):
        with safe_open(file, framework="pt") as opened:
            for name in names:
                if files[name][0] == file:
                    yield name, opened.get_tensor(name)


def _check_tensors(
    place: str, found: dict[str, tuple[Path, tuple[int, ...]]], wanted: dict[str, tuple[int, ...]]
) -> None:
    from components.learner.megatron.bridge import TIED_HEAD, missing_text, shape_text

    missing = sorted(wanted.keys() - found.keys())
    # Old checkpoints carry rotary buffers, and some a copy of a tied head.
    surplus = sorted(
        name for name in found.keys() - wanted.keys() if not name.endswith("rotary_emb.inv_freq") and name != TIED_HEAD
    )
    if missing and surplus:
        raise DataError(
            f"{place}: weights of another architecture: they hold {surplus[0]}, which the model does not have, and "
            f"lack {missing[0]}. "
            "config.json and weights must belong together."
        )
    if missing:
        raise DataError(missing_text(place, missing))
    if surplus:
        shown = ", ".join(surplus[:3]) + (f" and {len(surplus) - 3} more" if len(surplus) > 3 else "")
        raise DataError(
            f"{place}: tensors {shown} that the model does not have; config.json and weights must belong together."
        )
    for name, shape in wanted.items():
        if found[name][1] != shape:
            raise DataError(shape_text(place, name, found[name][1], shape))


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
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    # Gradient norm and optimiser read these attributes of every parameter.
    for parameter in chunk.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def _transformer_engine(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # megatron-core says on import, a dozen times, that it found neither; both are optional.
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
        yield
