"""The page of `creditgraph credit`: the credit of several methods for the same tokens, a column per method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.credit.side_by_side import Comparison
from creditgraph.pipeline.app.report.pack import pack
from creditgraph.pipeline.app.report.page import render
from creditgraph.pipeline.app.report.rollouts import load_tokenizer, piece
from creditgraph.pipeline.run.metrics import plain
from creditgraph.pipeline.run.run_directory import write_aside


def cards(comparison: Comparison) -> list[dict[str, Any]]:
    """One dict per rollout of a comparison, as plain values."""
    columns = {c.name: c.credit for c in comparison.columns if c.credit is not None}
    scale = {name: max([1e-12, *credit.values.abs().tolist()]) for name, credit in columns.items()}
    prompts = comparison.prompts
    texts = dict(zip(prompts.uid.tolist(), zip(prompts.text, prompts.answer, strict=True), strict=True))
    trajectories = comparison.trajectories
    tokenizer = load_tokenizer(comparison.model)
    rows = []
    for i, uid in enumerate(trajectories.uid.tolist()):
        prompt, answer = texts.get(int(trajectories.prompt_uid[i]), ("", ""))
        rows.append(
            {
                "uid": str(uid),
                "prompt": prompt[:20_000],
                "answer": answer,
                "reward": comparison.reward[i],
                "error": comparison.error[i],
                "inherited": int(trajectories.inherited[i]),
                "pieces": [piece(tokenizer, token) for token in trajectories.response_tokens.row(i).tolist()],
                "ends": comparison.ends.row(i).tolist(),
                "credit": {name: [float(f"{v:.5g}") for v in c.row(i).tolist()] for name, c in columns.items()},
                "scale": scale,
            }
        )
    return rows


def write_credit(comparison: Comparison, target: Path, title: str) -> int:
    """Writes the page; returns its size in bytes."""
    rows = cards(comparison)
    methods = [
        {"name": c.name, "note": c.note, "shown": c.credit is not None, "pearson": plain(c.pearson)}
        for c in comparison.columns
    ]
    text = render(
        "credit.jinja",
        scripts=("core.js", "credit.js"),
        blobs={"data-credit": pack({"cards": rows}, {})},
        title=title,
        subtitle=f"{len(rows)} rollout{'s' if len(rows) != 1 else ''} of iteration {comparison.iteration}",
        skip=("tokens", "tokens"),
        sections=[("methods", "Methods"), ("tokens", "Token by token")],
        methods=methods,
        notes=comparison.notes,
        cards=rows,
    )
    write_aside(target, text, "-o FILE")
    return len(text.encode())
