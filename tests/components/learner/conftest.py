"""A random tiny Qwen2 on disk, and rollout batches for it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Trajectories

VOCAB = 42


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """folder(tied=…) → a saved random Qwen2 with two layers and grouped-query attention."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    made: dict[bool, Path] = {}

    def folder(tied: bool = True) -> Path:
        if tied not in made:
            torch.manual_seed(3)
            config = Qwen2Config(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                tie_word_embeddings=tied,
                initializer_range=0.2,
            )
            path = tmp_path_factory.mktemp("qwen2")
            Qwen2ForCausalLM(config).save_pretrained(path)
            made[tied] = path
        return made[tied]

    return folder


def random_rows(lengths: list[int], dtype: torch.dtype, generator: torch.Generator) -> Jagged:
    values = torch.randint(0, VOCAB, (sum(lengths),), generator=generator).to(dtype)
    return Jagged.from_lengths(values, torch.tensor(lengths))


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., tuple[Trajectories, Credit]]:
    """make_batch(rows=8, seed=0, zero=False, inherited=0) → random trajectories, two per prompt, with random credit."""

    def make(
        rows: int = 8, seed: int = 0, zero: bool = False, inherited: int = 0, version: int = 0
    ) -> tuple[Trajectories, Credit]:
        g = torch.Generator().manual_seed(seed)
        prompts = torch.randint(2, 7, (rows,), generator=g).tolist()
        lengths = torch.randint(3, 15, (rows,), generator=g).tolist()
        response = random_rows(lengths, torch.int32, g)
        noise = torch.rand(len(response.values), generator=g)
        uid = torch.arange(rows) + 100
        keep = response.positions >= inherited
        trajectories = Trajectories(
            uid=uid,
            prompt_uid=torch.arange(rows) // 2,
            group=torch.arange(rows) // 2,
            parent=torch.full((rows,), -1),
            prompt_tokens=random_rows(prompts, torch.int32, g),
            response_tokens=response,
            inherited=torch.full((rows,), inherited),
            engine_logprobs=response.with_values(-2.0 - noise),
            entropies=response.with_values(3.0 * noise),
            thought_ends=Jagged.from_rows([[n] for n in lengths], torch.int32),
            policy_version=torch.full((rows,), version),
            finish_reason=["eos"] * rows,
            text=[""] * rows,
        )
        per_row = torch.zeros(rows) if zero else torch.randn(rows, generator=g)
        return trajectories, Credit(uid=uid, advantage=response.spread(per_row), mask=response.with_values(keep))

    return make


@pytest.fixture
def make_learner(model_folder: Callable[..., Path], device: str) -> Callable[..., HFLearner]:
    """make_learner(tied=True, dtype="float32", iterations=4, **settings) → a set-up learner."""

    def make(tied: bool = True, dtype: str = "float32", iterations: int = 4, **settings: object) -> HFLearner:
        learner = HFLearner(HFLearner.Config(**settings))
        spec = ModelSpec(path=str(model_folder(tied)), dtype=dtype)
        learner.setup(Context(node="learner", iterations=iterations, device=device, model=spec))
        return learner

    return make
