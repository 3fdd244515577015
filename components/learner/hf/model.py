"""A transformers causal LM as the learner uses it: packed log-probs, LoRA, a frozen reference, published weights."""

import contextlib
import copy
import logging
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from creditgraph.components.learner.dtensors import gather
from creditgraph.components.learner.head import HeadPlan
from creditgraph.components.learner.hf.replay import Replay
from creditgraph.components.learner.hf.settings import Recompute
from creditgraph.components.learner.hf.sharding import ADAPTED, Entry, Sharding, gathered, unit_of, without_memory
from creditgraph.components.learner.logprobs import Head, token_logprobs
from creditgraph.components.learner.lora import ALL_LINEAR, Lora, initial_a
from creditgraph.components.learner.packing.attention import register
from creditgraph.components.learner.packing.flash import check_fast, keeping, obstacle
from creditgraph.components.learner.packing.pack import PackedBatch, pack
from creditgraph.components.models.experts import unstack
from creditgraph.pipeline.core.errors import ConfigError, extra
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Adapter

log = logging.getLogger(__name__)


class LearnerModel:
    """Wraps a loaded model for training.

    Args:
        model: a transformers causal LM on its device; with `shards` an empty one, whose weights are then read.
        lora: adapters; None or rank 0 for full fine-tuning.
        recompute: activations recomputed in the backward pass; see `HFSettings`.
        keep_reference: whether to keep the initial weights for scoring.
        seed: random seed of the adapters' initial values.
        slow_attention: whether to accept attention without flash kernels on a GPU; see `Compute`.
        shards: the ranks that hold the model together, and the folder of its weights; None: this rank holds all of it.
        compiled: whether torch.compile fuses what transformers leaves apart; see `HFSettings.compile`.

    Attributes:
        packs: whether the model takes packed sequences.
        head_plan: chunks and precision of the output head.
    """

    def __init__(
        self,
        model: Any,
        lora: Lora | None = None,
        recompute: Recompute = "none",
        keep_reference: bool = False,
        seed: int = 0,
        slow_attention: bool = False,
        shards: tuple[Sharding, str] | None = None,
        compiled: bool = False,
    ) -> None:
        lora = lora or Lora()
        model.config.use_cache = False
        model.eval()
        self.tied = _is_tied(model)
        reference = copy.deepcopy(model).requires_grad_(False) if keep_reference and not lora.rank else None
        with contextlib.nullcontext() if shards is None else without_memory(model):
            self._peft = _with_lora(model, lora, seed) if lora.rank else None
        self._lora = lora
        self.causal_lm = model
        self._replay = Replay(model)
        self.head_plan = HeadPlan()
        if not lora.rank:
            model.requires_grad_(True)
        self._entry = _entry(model, shards, trained=not lora.rank)
        self._reference = None if reference is None else _entry(reference, shards, trained=False)
        self._check_head()
        self.packs = _packs(self._entry, slow_attention)
        if shards is not None and not self.packs:
            raise ConfigError(
                f"learner.hf: sharded over several ranks it packs sequences, which {type(model).__name__} does not "
                "support (the reason is above). Set learner.fsdp_size=1, or use another model."
            )
        if self._reference is not None and self.packs:
            self._reference.model.set_attn_implementation(register())
        if recompute == "full":
            _checkpoint(model)
        for whole in (model, reference) if compiled else ():
            _compile(whole)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._entry.dtype

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name → trained parameter; a tied weight appears once."""
        return {n: p for n, p in self.causal_lm.named_parameters() if p.requires_grad}

    def embedding_names(self) -> set[str]:
        """Names of trained parameters that are embeddings or the output head."""
        weights = {id(m.weight) for m in self.causal_lm.modules() if isinstance(m, nn.Embedding)}
        head = self.causal_lm.get_output_embeddings()
        if head is not None:
            weights.add(id(head.weight))
        return {n for n, p in self.trainable().items() if id(p) in weights}

    def logprobs(self, batch: PackedBatch, temperature: float) -> tuple[Jagged, Jagged]:
        """Log-probs and entropies of the response tokens, float32, with gradient."""
        return self._score(self._entry, batch, temperature)

    @torch.no_grad()
    def reference_logprobs(self, batch: PackedBatch, temperature: float) -> Jagged:
        """Log-probs under the initial weights."""
        if self._reference is not None:
            return self._score(self._reference, batch, temperature)[0]
        if self._peft is None:
            raise RuntimeError("learner: no reference model was kept")
        # Without its adapters the model is the initial one.
        with self._peft.disable_adapter():
            return self._score(self._entry, batch, temperature)[0]

    def _check_head(self) -> None:
        _check_logits(self._entry)

    def _score(self, entry: Entry, batch: PackedBatch, temperature: float) -> tuple[Jagged, Jagged]:
        self._replay.use(batch, self.packs)
        return batch.by_row(*entry.run(_scores, batch, temperature, self.packs, self.head_plan))

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under the names of files, one whole tensor after the other; all ranks of a sharded model iterate.

        Adapters are merged, and a tied output head is left out (the embedding holds it). A tensor is the model's own or
        ends with its layer, so a caller that keeps it copies it.
        """
        head = _head_name(self.causal_lm) if self.tied else ""
        names = [n for n in self.causal_lm.state_dict() if ".lora_" not in n and n != head]
        for unit, members in groupby(names, lambda name: unit_of(self._entry, name)):
            with gathered(unit):
                for name in members:
                    yield from unstack({name.replace(ADAPTED, "."): self._whole(name)})

    def _whole(self, name: str) -> Tensor:
        """A parameter or buffer whose layer is gathered, with its adapter."""
        place, _, leaf = name.rpartition(".")
        tensor: Tensor = getattr(self.causal_lm.get_submodule(place), leaf)
        if not name.endswith(f"{ADAPTED}weight"):
            return tensor
        layer: Any = self.causal_lm.get_submodule(place.removesuffix(".base_layer"))
        # peft's merge adds the delta in the delta's dtype, then rounds once.
        delta: Tensor = layer.get_delta_weight(layer.active_adapters[0])
        return tensor + delta.to(tensor.dtype)

    def published(self) -> dict[str, Tensor]:
        """A snapshot of `export`."""
        return {name: tensor.detach().clone() for name, tensor in self.export()}

    @torch.no_grad()
    def published_adapter(self) -> tuple[dict[str, Tensor], Adapter]:
        """A snapshot of the adapters alone, under PEFT's names, and their description."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        adapter = self._lora.published(name.partition(".lora_")[0] for name in state)
        return {name: gather(tensor.detach()).clone() for name, tensor in state.items()}, adapter


def _entry(model: Any, shards: tuple[Sharding, str] | None, trained: bool) -> Entry:
    if shards is None:
        return Entry(model)
    dtype = model.dtype
    if trained:
        # The shards are the master weights; layers compute with them rounded to the model's dtype.
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    sharding, path = shards
    return sharding.shard(model, path, dtype if trained and dtype != torch.float32 else None)


def _scores(model: Any, batch: PackedBatch, temperature: float, packs: bool, plan: HeadPlan) -> tuple[Tensor, Tensor]:
    chosen = batch.predicting(hidden_states(model, batch, packs))
    return token_logprobs(chosen, batch.next_tokens, Head.of(model), temperature, plan.chunk, plan.wide)


def hidden_states(model: Any, batch: PackedBatch, packs: bool) -> Tensor:
    """Last hidden states [tokens, D]; rows are computed one by one if the model does not support packed sequences."""
    bounds = [0, batch.tokens] if packs else batch.layout.offsets.tolist()
    # Only models whose layers are recomputed are in training mode (see _checkpoint).
    packed = {"packed": batch.layout, "recomputed": model.training} if packs else {}
    out = []
    for begin, end in pairwise(bounds):
        ids = batch.input_ids[:, begin:end]
        positions = batch.position_ids[:, begin:end]
        result = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **packed)
        out.append(result.last_hidden_state[0])
    return out[0] if len(out) == 1 else torch.cat(out)


@torch.no_grad()
def _check_logits(entry: Entry) -> None:
    """Raises ValueError when the model's logits are more than its head applied to its last hidden states."""
    worst, dtype = entry.run(_head_error)
    if not worst <= (1e-3 if dtype == torch.float32 else 0.2):
        raise ValueError(
            f"learner: log-probs of {type(entry.model).__name__} from its output head differ from its own logits by "
            f"{worst:.2g} nats; its forward pass does more than a linear head with scale and soft cap. Add that to "
            "creditgraph.components.learner.logprobs.Head, or use another model."
        )


def _head_error(model: Any) -> tuple[float, torch.dtype]:
    """Largest difference of log-probs in nats, and the dtype they were computed in."""
    embedding = model.get_input_embeddings().weight
    ids = torch.arange(6, device=embedding.device)[None] % model.config.get_text_config().vocab_size
    targets = ids[0, 1:]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    own = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    computed, _ = token_logprobs(hidden, targets, Head.of(model))
    return float((computed - own).abs().max()), hidden.dtype


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next(f"{n}.weight" for n, m in model.named_modules() if m is head)


def _is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def _packs(entry: Entry, slow_attention: bool = False) -> bool:
    """Switches the model to packed attention if it supports that.

    On a GPU a model without it, and packed attention without flash kernels, are ConfigErrors unless `slow_attention`.
    """
    model = entry.model
    device = next(model.parameters()).device
    reason = _unpackable(entry)
    if device.type == "cuda":
        slow = f"{type(model).__name__} does not take packed sequences ({reason})" if reason else ""
        check_fast(slow or _slow_reason(entry, device), slow_attention)
    if reason:
        log.warning(
            "%s does not take packed sequences (%s); rows go through it one by one", type(model).__name__, reason
        )
    return not reason


def _unpackable(entry: Entry) -> str:
    """Switches the model to packed attention and tests it on three rows.

    If that fails it restores the model's own attention and returns the reason, else "".
    """
    model = entry.model
    own = model.config._attn_implementation
    device = str(next(model.parameters()).device)
    vocab = model.get_input_embeddings().weight.shape[0]
    rows = [[(7 * i + 3) % vocab for i in range(n)] for n in (9, 4, 6)]
    prompts = Jagged.from_rows([r[:1] for r in rows], torch.int64).to(device)
    responses = Jagged.from_rows([r[1:] for r in rows], torch.int64).to(device)
    try:
        with torch.no_grad():
            batch = pack(prompts, responses, torch.arange(3, device=device))
            separate_hidden = entry.run(hidden_states, batch, False)
            model.set_attn_implementation(register())
            packed_hidden = entry.run(hidden_states, batch, True)
        tolerance = 1e-4 if separate_hidden.dtype == torch.float32 else 0.1
        largest = separate_hidden.abs().max().clamp(min=1e-6)
        worst = float((packed_hidden - separate_hidden).abs().max() / largest)
        if worst <= tolerance:
            return ""
        reason = f"packed and separate sequences differ by {worst:.2g} of the largest hidden value"
    except (NotImplementedError, TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    model.set_attn_implementation(own)
    return reason


def _slow_reason(entry: Entry, device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    config = entry.model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windows = {getattr(module, "sliding_window", None) for module in entry.model.modules()}
    reasons = (obstacle(device, entry.dtype, head_dim, window) for window in windows)
    return next(filter(None, reasons), "")


def _compile(model: nn.Module | None) -> None:
    """Fuses norms and gated products, for any number of tokens; attention has a kernel of its own."""
    chosen = [m for m in model.modules() if type(m).__name__.endswith(("RMSNorm", "MLP"))] if model is not None else []
    if model is not None and not chosen:
        raise ConfigError(f"learner.compile: {type(model).__name__} has no RMSNorm and no MLP. Set compile=false.")
    for module in chosen:
        module.compile(dynamic=True)


def _with_lora(model: Any, lora: Lora, seed: int) -> Any:
    with extra("lora", "learner.lora.rank", "set learner.lora.rank=0"):
        from peft import LoraConfig, get_peft_model

    target = lora.names or ALL_LINEAR
    # alpha is an int in peft's signature, but any number works; the scale is alpha / r.
    config: Any = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=target, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(
                f"learner: lora.target '{lora.target}' does not fit {type(model).__name__}: {error}"
            ) from error
    if lora.publish == "adapter":
        _check_linear(model)
    _draw(model, seed)
    return adapted


@torch.no_grad()
def _draw(model: Any, seed: int) -> None:
    """The initial values that adapters have in every learner."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            for a in layer.lora_A.values():
                a.weight.copy_(initial_a(seed, name, *a.weight.shape))


def _check_linear(model: Any) -> None:
    """Raises ValueError for adapters of other layers than linear ones, whose matrices engines read transposed."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        layer: Any = module
        if isinstance(module, LoraLayer) and not isinstance(layer.get_base_layer(), nn.Linear):
            raise ValueError(
                "learner: expected adapters of linear layers (torch.nn.Linear) only with lora.publish 'adapter', but "
                f"'{name}' is a {type(layer.get_base_layer()).__name__}. Change lora.target, or set "
                "lora.publish=merged."
            )


def _checkpoint(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    # Checkpointing acts in training mode only; dropout, the other thing the mode switches, was just set to 0.
    model.train()
    new = "activation_checkpointing_enable"  # since transformers 5.23
    enable = getattr(model, new if hasattr(model, new) else "gradient_checkpointing_enable")
    enable({"use_reentrant": False, "context_fn": keeping})
