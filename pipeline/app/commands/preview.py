"""`creditgraph preview`: the first prompts of a recipe, token by token, and what ends a response."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from rich.console import Console
from rich.text import Text

from pipeline.app.report.text import visible
from pipeline.core.errors import ConfigError
from pipeline.run.compose import build_experiment, compose

# Named by text: pipeline/ imports nothing of components/.
PREVIEW = "pipeline.app.data.preview"
_SHADES = ("on grey23", "on grey35")  # of neighbouring tokens, so that their borders show


def main(options: argparse.Namespace) -> int:
    """Prints ids and pieces; loads data and tokenizer, no model."""
    if options.prompts < 1 or options.tokens < 0:
        raise ConfigError("--prompts and --tokens: wanted at least 1 prompt, and 0 (all) or more tokens.")
    experiment = build_experiment(
        compose(options.overrides, options.config_dir), " ".join(options.overrides) or "preview"
    )
    module: Any = importlib.import_module(PREVIEW)
    found = module.preview(experiment, options.prompts)
    console = Console(highlight=False, soft_wrap=True)
    for number, shown in enumerate(found.prompts, 1):
        _prompt(console, number, shown, options.tokens)
    _ends(console, found)
    for warning in found.warnings:
        console.print(Text(f"note: {visible(warning)}"))
    return 0


def _prompt(console: Console, number: int, shown: Any, most: int) -> None:
    count = len(shown.pieces)
    head = f"prompt {number}: row {shown.source_row} of the data, template {shown.template}, {count} tokens"
    console.print(Text(f"{head}, answer '{visible(shown.answer[:80])}'", "bold"))
    text = Text()
    parts = (
        [shown.pieces]
        if not most or count <= most
        else [shown.pieces[: most // 2], shown.pieces[count - (most - most // 2) :]]
    )
    for part in parts:
        if part is not parts[0]:
            text.append(f"\n… {count - most} tokens …\n", "dim")
        for k, piece in enumerate(part):
            bare = visible(piece.text)
            text.append(f"⟦{bare}⟧" if piece.special else bare, "bold magenta" if piece.special else _SHADES[k % 2])
            if "\n" in piece.text:
                text.append("\n")
    console.print(text)
    ids = [[p.id for p in part] for part in parts]
    console.print(Text("ids " + " … ".join(" ".join(map(str, part)) for part in ids), "dim"))
    console.print()


def _ends(console: Console, found: Any) -> None:
    console.print(Text("a response ends", "bold"))
    console.print(Text("  at      " + ", ".join(f"{visible(token)} ({i})" for i, token in found.ends.items())))
    for node, stops in found.stops.items():
        named = ", ".join(f"'{visible(s)}'" for s in stops)
        budget = found.budgets[node]
        console.print(Text(f"  {node}: at most {budget:,} tokens" + (f"; strings {named}" if named else "")))
    longest = max(len(s.pieces) for s in found.prompts)
    room = found.context - longest
    console.print(Text(f"  context {found.context:,} tokens; the longest prompt above leaves {room:,}"))
    action = "cut at the beginning of their question" if found.long_prompts == "cut" else "rejected and counted"
    console.print(
        Text(
            f"  prompts of {found.context - found.reserve:,} tokens or more are {action} (prompts.reserve, "
            "prompts.long_prompts)"
        )
    )
