"""The first prompts of a configuration, token by token, as the model gets them, and what ends a response to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from components.engine.vocabulary import eos_mask, generation_config
from components.models.load import context_length, load_config, load_tokenizer
from components.prompts.dataset import DatasetPrompts
from pipeline.core.component import Context
from pipeline.core.errors import ConfigError, did_you_mean
from pipeline.run.compose import Experiment


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token: its id, the text it stands for, and whether it is special."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True, kw_only=True)
class PromptView:
    """One prompt.

    Attributes:
        pieces: its tokens in order.
        answer: reference answer.
        source_row: number of its row in the source.
        template: how it was made.
    """

    pieces: list[Piece]
    answer: str
    source_row: int
    template: str


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Prompts, stop tokens and limits of a configuration.

    Attributes:
        prompts: the first ones of iteration 0.
        stop_tokens: id → token, whatever the prompt's template.
        stop_strings: what ends a response or a thought, per sampling node.
        max_tokens: of a response, per sampling node.
        context: tokens in prompt plus response.
        reserve: tokens of the context that prompts leave free.
        long_prompts: what happens to prompts that are longer.
        warnings: what is likely not meant.
    """

    prompts: list[PromptView]
    stop_tokens: dict[int, str]
    stop_strings: dict[str, list[str]]
    max_tokens: dict[str, int]
    context: int
    reserve: int
    long_prompts: str
    warnings: list[str] = field(default_factory=list)


def preview(experiment: Experiment, count: int) -> Preview:
    """Runs the configuration's own prompts node for its first batches; loads the tokenizer, no model.

    Raises:
        ConfigError: the graph has no such node.
        DataError: the data or the tokenizer cannot be loaded.
    """
    nodes = {n.name: n for n in experiment.graph.nodes}
    node = next((n for n in nodes.values() if issubclass(n.cls, DatasetPrompts)), None)
    if node is None:
        raise ConfigError(f"preview: the graph has no node of prompts.dataset.{did_you_mean('prompts', nodes)}")
    tokenizer = load_tokenizer(experiment.model)
    component = node.cls(node.config)
    component.setup(Context(node=node.name, seed=experiment.run.seed, model=experiment.model, data=experiment.data))
    prompts: list[PromptView] = []
    while len(prompts) < min(count, len(component.rows)):
        batch = component.run().batch
        for tokens, answer, metadata in zip(batch.tokens.to_lists(), batch.answer, batch.metadata, strict=True):
            prompts.append(
                PromptView(
                    pieces=token_pieces(tokens, tokenizer),
                    answer=answer,
                    source_row=metadata["source_row"],
                    template=metadata["template"],
                )
            )
    prompts = prompts[:count]
    stop_tokens = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in stop_ids(experiment.model, tokenizer)}
    sampling = {
        n.name: n.config for n in nodes.values() if hasattr(n.config, "sampling") and hasattr(n.config, "thoughts")
    }
    return Preview(
        prompts=prompts,
        stop_tokens=stop_tokens,
        stop_strings={name: _stop_strings(config) for name, config in sampling.items()},
        max_tokens={name: config.max_tokens for name, config in sampling.items()},
        context=context_length(experiment.model),
        reserve=node.config.reserve,
        long_prompts=node.config.long_prompts,
        warnings=_warnings(prompts, tokenizer, stop_tokens),
    )


def token_pieces(ids: list[int], tokenizer: Any) -> list[Piece]:
    """Each token with its own text; a token that is part of a character shows as the tokenizer names it."""
    special = set(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    pieces = []
    for i in ids:
        text = tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        name = str(tokenizer.convert_ids_to_tokens(i))
        pieces.append(Piece(id=i, text=name if "\ufffd" in text or not text else text, special=i in special))
    return pieces


def stop_ids(spec: Any, tokenizer: Any) -> list[int]:
    """Ids that end a response in every engine: of the generation configuration, the tokenizer and the chat template."""
    vocab_size = int(load_config(spec).get_text_config().vocab_size)
    return [int(i) for i in eos_mask(generation_config(spec), tokenizer, vocab_size).nonzero()[:, 0]]


def _stop_strings(config: Any) -> list[str]:
    return [config.thoughts.stop, config.thoughts.final] if config.mode == "thought" else list(config.stop)


def _warnings(prompts: list[PromptView], tokenizer: Any, stop_tokens: dict[int, str]) -> list[str]:
    warnings = []
    bos = tokenizer.bos_token_id
    if prompts and bos is not None:
        doubled = [i for i, prompt in enumerate(prompts, 1) if [p.id for p in prompt.pieces[:2]] == [bos, bos]]
        if doubled:
            warnings.append(f"prompt {doubled[0]} begins with two {tokenizer.bos_token}")
        first = prompts[0]
        if first.template != "chat" and getattr(tokenizer, "add_bos_token", False) and first.pieces[0].id != bos:
            warnings.append(
                f"this tokenizer usually puts {tokenizer.bos_token} before raw text; prompts of template "
                f"{first.template} have none"
            )
    last = next((prompt.pieces[-1] for prompt in prompts if prompt.pieces[-1].id in stop_tokens), None)
    if last is not None:
        warnings.append(
            f"prompts end with {last.text}, which ends a response: the template lacks the beginning of the "
            "assistant's turn"
        )
    return warnings
