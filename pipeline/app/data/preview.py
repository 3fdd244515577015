"""The first prompts of a configuration, token by token, as the model will get them, and what ends a response to them."""

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
class Shown:
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
        ends: stop id → token, whatever the prompt's template.
        stops: strings that end a response or a thought, per sampling node.
        context: tokens in prompt plus response.
        reserve: tokens of the context that prompts leave free.
        long_prompts: what happens to prompts that are longer.
        budgets: response budget in tokens, per sampling node.
        warnings: what is likely not meant.
    """

    prompts: list[Shown]
    ends: dict[int, str]
    stops: dict[str, list[str]]
    context: int
    reserve: int
    long_prompts: str
    budgets: dict[str, int]
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
    component: Any = node.cls(node.config)
    component.setup(Context(node=node.name, seed=experiment.run.seed, model=experiment.model, data=experiment.data))
    shown: list[Shown] = []
    while len(shown) < min(count, len(component.rows)):
        batch = component.run().batch
        for i in range(min(len(batch), count - len(shown))):
            metadata = batch.metadata[i]
            pieces = token_pieces(batch.tokens.row(i).tolist(), tokenizer)
            shown.append(
                Shown(
                    pieces=pieces,
                    answer=batch.answer[i],
                    source_row=metadata["source_row"],
                    template=metadata["template"],
                )
            )
    ends = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in end_ids(experiment.model, tokenizer)}
    sampling = {
        n.name: n.config for n in nodes.values() if hasattr(n.config, "sampling") and hasattr(n.config, "thoughts")
    }
    return Preview(
        prompts=shown,
        ends=ends,
        stops={name: _stops(config) for name, config in sampling.items()},
        context=context_length(experiment.model),
        reserve=node.config.reserve,
        long_prompts=node.config.long_prompts,
        budgets={name: config.max_tokens for name, config in sampling.items()},
        warnings=_warnings(shown, tokenizer, ends),
    )


def token_pieces(ids: list[int], tokenizer: Any) -> list[Piece]:
    """Each token with its own text; a token that is part of a character shows as the tokenizer names it."""
    special = set(tokenizer.all_special_ids) | {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    found = []
    for i in ids:
        text = tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        name = str(tokenizer.convert_ids_to_tokens(i))
        found.append(Piece(id=i, text=name if "\ufffd" in text or not text else text, special=i in special))
    return found


def end_ids(spec: Any, tokenizer: Any) -> list[int]:
    """Ids that end a response in every engine: the generation configuration's, the tokenizer's, and the end of a chat turn."""
    vocab_size = int(load_config(spec).get_text_config().vocab_size)
    return [int(i) for i in eos_mask(generation_config(spec), tokenizer, vocab_size).nonzero()[:, 0]]


def _stops(config: Any) -> list[str]:
    if config.mode == "thought":
        return [config.thoughts.stop, config.thoughts.final]
    return list(config.stop)


def _warnings(shown: list[Shown], tokenizer: Any, ends: dict[int, str]) -> list[str]:
    found = []
    bos = tokenizer.bos_token_id
    if shown and bos is not None:
        doubled = [i for i, s in enumerate(shown) if [p.id for p in s.pieces[:2]] == [bos, bos]]
        if doubled:
            found.append(f"prompt {doubled[0] + 1} begins with two {tokenizer.bos_token}")
        if shown[0].template != "chat" and getattr(tokenizer, "add_bos_token", False) and shown[0].pieces[0].id != bos:
            found.append(
                f"this tokenizer usually puts {tokenizer.bos_token} before raw text; prompts of template "
                f"{shown[0].template} have none"
            )
    inside = next((p for s in shown for p in s.pieces[-1:] if p.id in ends), None)
    if inside is not None:
        found.append(
            f"prompts end with {inside.text}, which ends a response: the template lacks the beginning of the answer's "
            "turn"
        )
    return found
