"""The page of `creditgraph credit`: the credit of several methods for the same tokens, as a heat map per rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.app.bench.side_by_side import Comparison
from pipeline.app.report.pack import pack
from pipeline.app.report.page import render
from pipeline.app.text import visible
from pipeline.core.errors import ConfigError
from pipeline.run.metrics import plain
from pipeline.run.run_directory import write_aside, writing

STEP = 24  # pixels of a token
COLORS = ("#ff9f45", "#ffffff", "#62a7ff")  # of negative, no and positive credit
INK = "#1f2328"


def cards(comparison: Comparison) -> list[dict[str, Any]]:
    """One dict per rollout of a comparison, as plain values."""
    columns = {c.name: c.credit for c in comparison.columns if c.credit is not None}
    scale = {name: max([1e-12, *credit.values.abs().tolist()]) for name, credit in columns.items()}
    prompts = comparison.prompts
    texts = dict(zip(prompts.uid.tolist(), zip(prompts.text, prompts.answer, strict=True), strict=True))
    trajectories = comparison.trajectories
    rows = []
    for i, uid in enumerate(trajectories.uid.tolist()):
        prompt, answer = texts.get(int(trajectories.prompt_uid[i]), ("", ""))
        tokens = [[token] for token in trajectories.response_tokens.row(i).tolist()]
        rows.append(
            {
                "uid": str(uid),
                "prompt": prompt[:20_000],
                "answer": answer,
                "reward": comparison.reward[i],
                "error": comparison.error[i],
                "inherited": int(trajectories.inherited[i]),
                "pieces": comparison.tokenizer.batch_decode(
                    tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
                ),
                "ends": comparison.ends.row(i).tolist(),
                "credit": {name: [float(f"{v:.5g}") for v in c.row(i).tolist()] for name, c in columns.items()},
                "scale": scale,
            }
        )
    return rows


def _labels(card: dict[str, Any]) -> list[str]:
    """The text of each token as it fits above a cell."""
    pieces = [visible(p).replace("\n", "⏎").strip() or "␣" for p in card["pieces"]]
    return [p if len(p) <= 12 else p[:11] + "…" for p in pieces]


def heat_map(card: dict[str, Any], labels: str = "pieces") -> dict[str, Any]:
    """Vega-Lite: methods down, tokens across; colour and sign of a cell are its credit over the method's largest.

    `labels` names the parameter that holds the token texts.
    """
    pieces = _labels(card)
    values = [
        {
            "t": t,
            "method": name,
            "credit": v,
            "shade": v / card["scale"][name],
            "sign": "+" if v > 0 else "−" if v < 0 else "",
            "token": pieces[t],
        }
        for name, row in card["credit"].items()
        for t, v in enumerate(row)
    ]
    x = {
        "field": "t",
        "type": "ordinal",
        "axis": {"title": None, "orient": "top", "labelAngle": -55, "labelExpr": f"{labels}[datum.value]"},
    }
    y = {"field": "method", "type": "nominal", "sort": list(card["credit"]), "axis": {"title": None, "labelLimit": 220}}
    shade = {
        "field": "shade",
        "type": "quantitative",
        "legend": None,
        "scale": {"domain": [-1, 0, 1], "range": list(COLORS), "interpolate": "rgb"},
    }
    tooltip = [{"field": "token"}, {"field": "method"}, {"field": "credit", "format": "+.4f"}]
    cuts = [{"t": end - 1} for end in card["ends"] if 0 < end < len(pieces)]
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "rect"}, "encoding": {"color": shade, "tooltip": tooltip}},
        {
            "mark": {"type": "text", "fontSize": 12, "color": INK},
            "encoding": {"text": {"field": "sign"}, "tooltip": tooltip},
        },
    ]
    marks: list[dict[str, Any]] = [{"data": {"values": values}, "layer": layers, "encoding": {"y": y}}]
    if cuts:
        marks.append(
            {
                "data": {"values": cuts},
                "mark": {"type": "rule", "color": INK, "strokeWidth": 1.5},
                "encoding": {"x": {**x, "bandPosition": 1}},
            }
        )
    return {
        "params": [{"name": labels, "value": pieces}],
        "width": {"step": STEP},
        "height": {"step": STEP},
        "layer": marks,
        "encoding": {"x": x},
    }


def write_credit(comparison: Comparison, target: Path, title: str) -> int:
    """Writes the page; returns its size in bytes."""
    rows = cards(comparison)
    methods = [
        {"name": c.name, "note": c.note, "shown": c.credit is not None, "pearson": plain(c.pearson)}
        for c in comparison.columns
    ]
    text = render(
        "credit.jinja",
        scripts=("core.js", "charts.js", "credit.js"),
        blobs={"data-credit": pack({"cards": rows, "specs": [heat_map(c) for c in rows]}, {})},
        title=title,
        subtitle=f"{len(rows)} rollouts of iteration {comparison.iteration}",
        skip=("tokens", "tokens"),
        sections=[("methods", "Methods"), ("tokens", "Token by token")],
        methods=methods,
        notes=comparison.notes,
        cards=rows,
    )
    write_aside(target, text, "-o FILE")
    return len(text.encode())


def write_still(comparison: Comparison, target: Path, most: int = 2) -> None:
    """Writes the heat maps of the first rollouts as .svg or .png, light on white."""
    import vl_convert

    if target.suffix not in (".svg", ".png"):
        raise ConfigError(f"--still {target}: expected .svg or .png, got '{target.suffix}'.")
    rows = cards(comparison)[:most]
    if not rows:
        raise ConfigError("--still: no rollout to draw.")
    maps = []
    params = []
    for i, card in enumerate(rows):
        chart = heat_map(card, f"pieces{i}")
        params += chart.pop("params")  # names of parameters are global
        title = {"text": _caption(card), "anchor": "start", "fontWeight": "normal", "fontSize": 13}
        maps.append({**chart, "title": title})
    spec: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "background": "white",
        # Fonts may be wider than those that Vega computed the widths with.
        "padding": {"left": 30, "top": 5, "right": 5, "bottom": 5},
        "params": params,
        "vconcat": maps,
        "config": {"aria": False, "axis": {"labelFontSize": 12}, "view": {"stroke": None}},
        "resolve": {"scale": {"x": "independent"}},
    }
    with writing(target, "-o FILE"):
        if target.suffix == ".svg":
            target.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
        else:
            target.write_bytes(vl_convert.vegalite_to_png(spec, scale=2))


def _caption(card: dict[str, Any]) -> str:
    outcome = "right" if card["reward"] > 0 else "wrong"  # a NaN reward is wrong
    error = f", first wrong thought: {card['error']}" if card["error"] else ""
    return f"{outcome} answer (reward {card['reward']:g}){error}"
