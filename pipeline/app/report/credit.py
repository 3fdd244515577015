"""The page of `creditgraph credit`: several methods' credit over the same tokens, as a heat map per rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.app.report.pack import pack
from pipeline.app.report.page import render
from pipeline.app.text import visible
from pipeline.core.errors import ConfigError
from pipeline.run.metrics import plain
from pipeline.run.run_directory import write_aside, writing

STEP = 24  # pixels of a token
LIGHT = ("#ff9f45", "#ffffff", "#62a7ff")


def cards(found: Any) -> list[dict[str, Any]]:
    """One dict per rollout of a comparison (see `pipeline.app.bench.side_by_side.Comparison`), as plain values."""
    from pipeline.core.jagged import Jagged

    columns = [c for c in found.columns if c.credit is not None]
    scale = {c.name: max(float(c.credit.values.abs().max()) if len(c.credit.values) else 0.0, 1e-12) for c in columns}
    prompts = dict(
        zip(found.prompts.uid.tolist(), zip(found.prompts.text, found.prompts.answer, strict=True), strict=True)
    )
    tokens: Jagged = found.trajectories.response_tokens
    out = []
    for i, uid in enumerate(found.trajectories.uid.tolist()):
        ids = tokens.row(i).tolist()
        prompt, answer = prompts.get(int(found.trajectories.prompt_uid[i]), ("", ""))
        out.append(
            {
                "uid": str(uid),
                "prompt": prompt[:20_000],
                "answer": answer,
                "reward": found.reward[i],
                "error": found.error[i],
                "inherited": int(found.trajectories.inherited[i]),
                "pieces": found.tokenizer.batch_decode(
                    [[t] for t in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
                ),
                "ends": found.ends.row(i).tolist(),
                "credit": {c.name: [float(f"{v:.5g}") for v in c.credit.row(i).tolist()] for c in columns},
                "scale": scale,
            }
        )
    return out


def heat_map(card: dict[str, Any], colors: Sequence[str] = LIGHT, ink: str = "#1f2328") -> dict[str, Any]:
    """Vega-Lite: methods down, tokens across; colour and sign of each cell are its credit over the method's largest."""
    pieces = [visible(p).replace("\n", "⏎").strip() or "␣" for p in card["pieces"]]
    pieces = [p if len(p) <= 12 else p[:11] + "…" for p in pieces]
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
        "axis": {"title": None, "orient": "top", "labelAngle": -55, "labelExpr": "pieces[datum.value]"},
    }
    y = {"field": "method", "type": "nominal", "sort": list(card["credit"]), "axis": {"title": None, "labelLimit": 220}}
    shade = {
        "field": "shade",
        "type": "quantitative",
        "legend": None,
        "scale": {"domain": [-1, 0, 1], "range": list(colors), "interpolate": "rgb"},
    }
    tooltip = [{"field": "token"}, {"field": "method"}, {"field": "credit", "format": "+.4f"}]
    cuts = [{"t": end - 1} for end in card["ends"] if 0 < end < len(pieces)]
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "rect"}, "encoding": {"color": shade, "tooltip": tooltip}},
        {
            "mark": {"type": "text", "fontSize": 12, "color": ink},
            "encoding": {"text": {"field": "sign"}, "tooltip": tooltip},
        },
    ]
    marks: list[dict[str, Any]] = [{"data": {"values": values}, "layer": layers, "encoding": {"y": y}}]
    if cuts:
        marks.append(
            {
                "data": {"values": cuts},
                "mark": {"type": "rule", "color": ink, "strokeWidth": 1.5},
                "encoding": {"x": {**x, "bandPosition": 1}},
            }
        )
    return {
        "params": [{"name": "pieces", "value": pieces}],
        "width": {"step": STEP},
        "height": {"step": STEP},
        "layer": marks,
        "encoding": {"x": x},
    }


def write_credit(found: Any, target: Path, title: str) -> int:
    """Writes the page; returns its size in bytes."""
    rows = cards(found)
    methods = [
        {"name": c.name, "note": c.note, "shown": c.credit is not None, "pearson": plain(c.pearson)}
        for c in found.columns
    ]
    text = render(
        "credit.jinja",
        scripts=("core.js", "charts.js", "credit.js"),
        blobs={"data-credit": pack({"cards": rows, "specs": [heat_map(c) for c in rows]}, {})},
        title=title,
        subtitle=f"{len(rows)} rollouts of iteration {found.iteration}",
        skip=("tokens", "tokens"),
        sections=[("methods", "Methods"), ("tokens", "Token by token")],
        methods=methods,
        notes=found.notes,
        cards=rows,
    )
    write_aside(target, text)
    return len(text.encode())


def write_still(found: Any, target: Path, most: int = 2) -> None:
    """Writes the heat maps of the first rollouts as .svg or .png, light on white."""
    import vl_convert

    if target.suffix not in (".svg", ".png"):
        raise ConfigError(f"--still {target}: ending '{target.suffix}'; wanted .svg or .png.")
    rows = cards(found)[:most]
    if not rows:
        raise ConfigError("--still: no rollout to draw.")
    maps = [
        {**heat_map(c), "title": {"text": _caption(c), "anchor": "start", "fontWeight": "normal", "fontSize": 13}}
        for c in rows
    ]
    spec: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "background": "white",
        "padding": {
            "left": 30,
            "top": 5,
            "right": 5,
            "bottom": 5,
        },  # fonts here may be wider than those the widths were computed with
        "params": [],
        "vconcat": [],
        "config": {"aria": False, "axis": {"labelFontSize": 12}, "view": {"stroke": None}},
        "resolve": {"scale": {"x": "independent"}},
    }
    for i, chart in enumerate(maps):  # names of parameters are global
        name = f"pieces{i}"
        chart["params"] = []
        spec["params"].append(
            {"name": name, "value": [visible(p).replace("\n", "⏎").strip() or "␣" for p in rows[i]["pieces"]]}
        )
        _rename(chart, name)
        spec["vconcat"].append(chart)
    with writing(target):
        if target.suffix == ".svg":
            target.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
        else:
            target.write_bytes(vl_convert.vegalite_to_png(spec, scale=2))


def _caption(card: dict[str, Any]) -> str:
    reward = card["reward"]
    outcome = "right" if not math.isnan(reward) and reward > 0 else "wrong"
    return f"{outcome} answer (reward {reward:g})" + (
        f", first wrong thought: {card['error']}" if card["error"] else ""
    )


def _rename(value: Any, name: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "labelExpr":
                value[key] = f"{name}[datum.value]"
            else:
                _rename(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _rename(inner, name)
