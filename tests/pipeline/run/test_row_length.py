"""The longest row of a graph: what engines make room for, in place of the model's whole context."""

import pytest

from creditgraph.components.engine.base import EnginePolicy
from creditgraph.components.models.load import check_context, context_length
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import CreditgraphError, GraphError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.compose.row_length import TEMPLATE_TOKENS


class LongContext:
    max_position_embeddings = 40_960


def longest(*overrides):
    return build_experiment(compose(list(overrides))).model


@pytest.mark.parametrize(
    ("recipe", "tokens"),
    [
        ("grpo_qwen3_4b", 4096 + 4096),
        # The localizer reads a failure of 5,120 tokens and writes 4,096 about it.
        ("srpo_qwen2_5_14b_instruct", 4096 + 5120 + 4096 + TEMPLATE_TOKENS),
        # A reference is scored after a response.
        ("rredcot_qwen3_4b", 4096 + 25_000 + TEMPLATE_TOKENS),
        # A revision reads two responses.
        ("ibpo_qwen3_32b", 4096 + 3 * 16_384 + TEMPLATE_TOKENS),
        # A refinement reads its original.
        ("critique_grpo_qwen3_8b", 4096 + 2 * 6144 + TEMPLATE_TOKENS),
        # Continuations count what they inherit.
        ("vineppo_deepseekmath_7b", 4096 + 1024),
    ],
)
def test_rows_hold_the_prompt_what_is_sampled_and_what_is_shown(recipe, tokens):
    model = longest(f"recipe={recipe}")
    assert model.longest_row == tokens
    assert check_context(model, LongContext) == min(tokens, 40_960)


def test_prompts_samples_and_the_setting_count():
    model = longest("recipe=grpo_qwen3_4b", "prompts.max_tokens=512", "sampler.max_tokens=1000")
    assert model.longest_row == 512 + 1000
    model = longest("recipe=grpo_qwen3_4b", "model.max_context=2000")
    assert check_context(model, LongContext) == 2000
    assert check_context(ModelSpec(), LongContext) == 40_960  # without a graph
    assert context_length(longest("recipe=toy_grpo")) == 512  # the model's own limit
    with pytest.raises(GraphError, match=r"model.longest_row: unknown setting"):
        longest("recipe=toy_grpo", "+model.longest_row=7")


def test_a_longer_row_than_the_context_is_a_sentence():
    class Engine:
        context_length = 10
        vocab_size = 50
        spec = ModelSpec()
        tokenizer = None

    rows = Jagged.from_rows([[5] * 8]), Jagged.from_rows([[6] * 3])
    with pytest.raises(
        CreditgraphError,
        match=r"score: expected rows of at most 10 tokens .*, got 11\. Shorten .* or raise model.max_con",
    ):
        EnginePolicy._check_scored(type("P", (), {"engine": Engine, "_check_tokens": lambda *_, **__: None})(), *rows)
