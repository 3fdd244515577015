"""Prints the first prompts of a configuration, token by token, and the tokens and strings that end a response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from creditgraph.components.engine.vocabulary import eos_mask, generation_config
from creditgraph.components.models.load import context_length, load_config, load_tokenizer
from creditgraph.components.prompts.dataset import DatasetPrompts
from creditgraph.components.text.templates import special_ids
from creditgraph.pipeline.app.data.asked import asked, on_cpu
from creditgraph.pipeline.app.text import visible
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.payloads import Prompts
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.run.compose.experiment import Experiment
from creditgraph.pipeline.run.session import GraphSession

_SHADES = ("on grey23", "on grey35")  # of neighbouring tokens, so that their borders show


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token: its id, its text, and whether it is special."""

    id: int
    text: str
    special: bool


def print_preview(experiment: Experiment, count: int, max_tokens: int) -> None:
    """Prints the first prompts of the configuration, and what its other nodes ask; loads the tokenizer, no model.

    Args:
        experiment: the configuration.
        count: prompts to show.
        max_tokens: tokens to show of each, from both ends; 0 shows all.

    Raises:
        ConfigError: the graph has no such node.
        DataError: the data or the tokenizer cannot be loaded.
    """
    nodes = {n.name: n for n in experiment.graph.nodes}
    node = next((n for n in nodes.values() if issubclass(n.cls, DatasetPrompts)), None)
    if node is None:
        raise ConfigError(f"data preview: the graph has no node of prompts.dataset.{did_you_mean('prompts', nodes)}")
    tokenizer = load_tokenizer(experiment.model)
    console = Console(highlight=False, soft_wrap=True)
    with GraphSession(on_cpu(experiment)) as session:
        prompts, templates = _print_prompts(console, session, node, tokenizer, count, max_tokens)
    _print_ends(console, experiment, node, prompts, templates[0], tokenizer)


def _print_prompts(
    console: Console, session: GraphSession, node: Node, tokenizer: Any, count: int, max_tokens: int
) -> tuple[list[list[Piece]], list[str]]:
    """Prints `count` problems and what else is asked; returns tokens and template of each problem."""
    component: Any = session.runner(node).component
    first: Prompts | None = None
    prompts: list[list[Piece]] = []
    templates: list[str] = []
    count = min(count, len(component.rows))
    while len(prompts) < count:
        batch = component.run().batch
        first = batch if first is None else first
        for row in range(min(len(batch), count - len(prompts))):
            prompts.append(_pieces(batch.tokens.row(row).tolist(), tokenizer))
            templates.append(batch.metadata[row]["template"])
            metadata = batch.metadata[row]
            head = f"prompt {len(prompts)}: row {metadata['source_row']} of the data, template {templates[-1]}"
            _print_pieces(console, head, prompts[-1], max_tokens, f", answer '{visible(batch.answer[row][:80])}'")
    if first is not None:
        for request in asked(session, node, first.select(torch.arange(min(len(first), 2))), tokenizer):
            if request.reason:
                console.print(Text(f"note: what '{request.node}' asks cannot be shown: {visible(request.reason)}"))
                continue
            head = f"'{request.node}' asks, about a wrong answer made up for this preview"
            _print_pieces(console, head, _pieces(request.tokens, tokenizer), max_tokens)
    return prompts, templates


def _print_ends(
    console: Console, experiment: Experiment, node: Node, prompts: list[list[Piece]], template: str, tokenizer: Any
) -> None:
    """Prints what ends a response, how much room there is, and likely mistakes."""
    ends = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in _stop_ids(experiment.model, tokenizer)}
    console.print(Text("a response ends", "bold"))
    console.print(Text("  at      " + ", ".join(f"{visible(token)} ({i})" for i, token in ends.items())))
    for name, config in ((n.name, n.config) for n in experiment.graph.nodes):
        if hasattr(config, "sampling") and hasattr(config, "thoughts"):
            by_thoughts = config.mode == "thought"
            strings = [config.thoughts.stop, config.thoughts.final] if by_thoughts else list(config.stop)
            named = "; strings " + ", ".join(f"'{visible(s)}'" for s in strings) if strings else ""
            console.print(Text(f"  {name}: at most {config.max_tokens:,} tokens{named}"))
    context = context_length(experiment.model)
    room = context - max(map(len, prompts))
    console.print(Text(f"  context {context:,} tokens; the longest prompt above leaves {room:,}"))
    limit = f"  prompts of more than {min(node.config.max_tokens, context - 1):,} tokens are rejected and counted"
    console.print(Text(f"{limit} ({node.name}.max_tokens)"))
    for warning in _warnings(prompts, template, tokenizer, ends):
        console.print(Text(f"note: {visible(warning)}"))


def _print_pieces(console: Console, head: str, pieces: list[Piece], max_tokens: int, rest: str = "") -> None:
    count = len(pieces)
    console.print(Text(f"{head}, {count} tokens{rest}", "bold"))
    parts = [pieces]
    if max_tokens and count > max_tokens:
        parts = [pieces[: max_tokens // 2], pieces[count - (max_tokens - max_tokens // 2) :]]
    text = Text()
    for part in parts:
        if part is not parts[0]:
            text.append(f"\n… {count - max_tokens} tokens …\n", "dim")
        for k, piece in enumerate(part):
            bare = visible(piece.text)
            text.append(f"⟦{bare}⟧" if piece.special else bare, "bold magenta" if piece.special else _SHADES[k % 2])
            if "\n" in piece.text:
                text.append("\n")
    console.print(text)
    ids = [" ".join(str(piece.id) for piece in part) for part in parts]
    console.print(Text("ids " + " … ".join(ids), "dim"))
    console.print()


def _pieces(ids: list[int], tokenizer: Any) -> list[Piece]:
    """Each token with its own text; a token that is part of a character shows as the tokenizer names it."""
    special = special_ids(tokenizer)
    pieces = []
    for i in ids:
        text = tokenizer.decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        name = str(tokenizer.convert_ids_to_tokens(i))
        pieces.append(Piece(id=i, text=name if "\ufffd" in text or not text else text, special=i in special))
    return pieces


def _stop_ids(model: ModelSpec, tokenizer: Any) -> list[int]:
    """Ids that end a response in every engine: of the generation configuration, the tokenizer and the chat template."""
    vocab_size = int(load_config(model).get_text_config().vocab_size)
    return [int(i) for i in eos_mask(generation_config(model), tokenizer, vocab_size).nonzero()[:, 0]]


def _warnings(prompts: list[list[Piece]], template: str, tokenizer: Any, ends: dict[int, str]) -> list[str]:
    """Warnings about likely mistakes."""
    warnings = []
    bos = tokenizer.bos_token_id
    if bos is not None:
        doubled = [i for i, pieces in enumerate(prompts, 1) if [p.id for p in pieces[:2]] == [bos, bos]]
        if doubled:
            warnings.append(f"prompt {doubled[0]} begins with two {tokenizer.bos_token}")
        if template != "chat" and getattr(tokenizer, "add_bos_token", False) and prompts[0][0].id != bos:
            warnings.append(
                f"this tokenizer usually puts {tokenizer.bos_token} before raw text; prompts of template {template} "
                "have none"
            )
    last = next((pieces[-1] for pieces in prompts if pieces[-1].id in ends), None)
    if last is not None:
        warnings.append(
            f"prompts end with {last.text}, which ends a response: the template lacks the beginning of the "
            "assistant's turn"
        )
    return warnings
