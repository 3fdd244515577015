"""Random models in Hugging Face layout and batches of random tokens for them, made on the spot."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from acceptance.measure import Run
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Trajectories


@dataclass(frozen=True)
class Shape:
    """A dense transformer of Qwen's kind, its input and output embedding one matrix."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    experts: int = 0  # in each layer, each of width `mlp`; a token goes to a quarter of them, at most four

    @property
    def chosen(self) -> int:
        """Experts that a token goes to."""
        return min(4, self.experts // 4)

    def forward_flops(self, tokens: int, length: int) -> float:
        """Operations of a forward pass that predicts `tokens` tokens in rows of `length`, with causal attention."""
        projections = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        gated = 3 * self.hidden * self.mlp
        mlp = self.chosen * gated + self.experts * self.hidden if self.experts else gated
        products = 2.0 * (self.layers * (projections + mlp) + self.vocab * self.hidden)
        # Scores and values, half of the square each.
        return tokens * (products + 2.0 * self.layers * length * self.heads * self.head_dim)


HALF = Shape("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936)
QWEN2 = Shape("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936)
QWEN3 = Shape("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936)
EXPERTS = Shape("qwen3_moe-1b", 12, 1024, 16, 4, 64, 768, 151936, experts=32)
SMALL = {
    QWEN2.name: Shape("qwen2-small", 2, 64, 4, 2, 16, 128, 512),
    HALF.name: Shape("qwen2-small", 2, 64, 4, 2, 16, 128, 512),
    QWEN3.name: Shape("qwen3-small", 2, 64, 4, 2, 32, 128, 512),
    EXPERTS.name: Shape("qwen3_moe-small", 2, 64, 4, 2, 16, 48, 512, experts=8),
}
CONTEXT = 1 << 17


def shape_of(run: Run, shape: Shape) -> Shape:
    """The shape, or its small likeness."""
    return SMALL[shape.name] if run.small else shape


def model_folder(run: Run, shape: Shape) -> str:
    """A folder with a model of random weights and a tokenizer of one word per token; made once."""
    folder = run.scratch / f"{shape.name}-{str(run.dtype).removeprefix('torch.')}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _write_model(run, shape, folder)
        (folder / "complete").touch()
    return str(folder)


def _write_model(run: Run, shape: Shape, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config, Qwen3MoeConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    kinds: dict[str, Any] = {"qwen2": Qwen2Config, "qwen2.5": Qwen2Config, "qwen3": Qwen3Config}
    more = {
        "moe_intermediate_size": shape.mlp,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.chosen,
        "norm_topk_prob": True,
    }
    kind = Qwen3MoeConfig if shape.experts else kinds[shape.name.partition("-")[0]]
    config = kind(
        **(more if shape.experts else {}),
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(config, dtype=run.dtype)
    model.save_pretrained(folder)
    del model
    run.free()
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(shape.vocab)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0", unk_token="w2")
    fast.save_pretrained(folder)


def context_of(run: Run, shape: Shape, node: str = "learner", iterations: int = 8) -> Context:
    """The context of a node with that model on the run's device."""
    spec = ModelSpec(path=model_folder(run, shape), dtype=str(run.dtype).removeprefix("torch."))
    return Context(node=node, iterations=iterations, device=run.device, model=spec)


def random_tokens(rows: int, length: int, vocab: int, seed: int) -> torch.Tensor:
    """int32 [rows, length] on the CPU, special tokens left out."""
    return torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def batch_of(prompts: torch.Tensor, responses: torch.Tensor, vocab: int) -> tuple[Trajectories, Credit]:
    """A rollout batch of rows [N, P] and [N, R] with credit +1 and −1 by turns.

    The engine's log-probs are those of a uniform distribution, which a random model is close to.
    """
    prompt = Jagged.from_rows(list(prompts), torch.int32)
    response = Jagged.from_rows(list(responses), torch.int32)
    count = len(prompts)
    uid = torch.arange(count)
    level = float(torch.tensor(float(vocab)).log())
    per_token = torch.zeros(len(response.values))
    trajectories = Trajectories(
        uid=uid,
        prompt_uid=uid,
        group=uid,
        parent=torch.full((count,), -1),
        prompt_tokens=prompt,
        response_tokens=response,
        inherited=torch.zeros(count, dtype=torch.int64),
        engine_logprobs=response.with_values(per_token - level),
        entropies=response.with_values(per_token + level),
        thought_ends=Jagged.from_rows([[responses.shape[1]]] * count, torch.int32),
        policy_version=torch.full((count,), -1),  # of no weights that the learner has: nothing is compared with them
        finish_reason=["length"] * count,
        text=[""] * count,
    )
    signs = torch.tensor([1.0, -1.0]).repeat(count)[:count]
    mask = response.with_values(torch.ones(len(response.values), dtype=torch.bool))
    return trajectories, Credit(uid=uid, advantage=response.spread(signs), mask=mask)
