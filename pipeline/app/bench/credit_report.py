"""The table and the figure of tools/creditbench."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

# Column head, where the number is, digits; gradient columns carry a standard error, the others a standard deviation
# over seeds.
COLUMNS: tuple[tuple[str, tuple[str, str], int], ...] = (
    ("spearman", ("mean", "spearman"), 2),
    ("pearson", ("mean", "pearson"), 2),
    ("sign", ("mean", "sign"), 2),
    ("on 1st error", ("mean", "error_share"), 2),
    ("bias", ("mean", "bias"), 2),
    ("grad cosine", ("gradient", "cosine"), 2),
)


def cell(pair: tuple[float, float], digits: int) -> str:
    """ "0.41 ±0.03", without the spread where it is not known, "-" where the number is not."""
    value, spread = pair
    if math.isnan(value):
        return "-"
    return f"{value:.{digits}f}" + ("" if math.isnan(spread) else f" ±{spread:.{digits}f}")


def thousands(value: float) -> str:
    """ "12.3k"; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value / 1000:.1f}k"


def table(result: dict[str, Any]) -> str:
    """One row per method, as a Markdown table, and below it what the true values were."""
    head = [
        "method",
        "rollouts",
        *(c[0] for c in COLUMNS),
        "noise",
        "sampled",
        "credit: sampled",
        "scored",
        "processed",
        "seconds",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, entry in result["methods"].items():
        mean = entry["mean"]
        cells = [name, {True: "own", False: "given"}.get(entry.get("own_rollouts"), "given")]
        cells += [cell(entry[part][key], digits) for _, (part, key), digits in COLUMNS]
        cells.append(cell(entry["tokens_relative"], 2))
        if "rollout_tokens" in mean:
            sampled = mean["rollout_tokens"][0] + mean["credit_sampled"][0]
            cells += [
                thousands(sampled),
                *(thousands(mean[f"credit_{k}"][0]) for k in ("sampled", "scored", "processed")),
            ]
            cells.append(cell(mean["credit_seconds"], 2))
        else:
            cells += ["-"] * 5
        lines.append("| " + " | ".join(cells) + " |")
    truths = result["truth"]
    average = {k: sum(t[k] for t in truths) / len(truths) for k in truths[0]}
    ceiling = [c for c in result["ceiling"] if not math.isnan(c)]
    lines += [
        "",
        f"{len(truths)} seeds; accuracy of the rollouts {average['accuracy']:.3f}; value at sound prefixes {average['value_sound']:.3f}, "
        f"after the first error {average['value_after_error']:.3f}; {100 * average['clear_share']:.0f} % of thoughts have |A| ≥ 0.1.",
        f"True values cost {thousands(average['sampled_tokens'])} tokens per seed over {average['states']:.0f} states. "
        + (
            f"Noise in them keeps even perfect credit at a Spearman of about {sum(ceiling) / len(ceiling):.2f}."
            if ceiling
            else ""
        ),
    ]
    lines += [f"Failed: {name} ({problem})." for name, problem in result["failed"].items()]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the figure: correlations, share on the first error, gradient noise at equal sampled tokens; blue: given rollouts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = result["methods"]
    names = list(entries)
    figure = Figure(figsize=(12, 1.2 + 0.32 * len(names)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3, sharey=True)
    places = list(range(len(names)))
    colors = [
        "tab:gray" if e.get("own_rollouts") is None else "tab:orange" if e["own_rollouts"] else "tab:blue"
        for e in entries.values()
    ]
    for axes, key, title in (
        (left, "pearson", "correlation with the true advantage"),
        (middle, "error_share", "share of |credit| on the 1st wrong thought"),
    ):
        pairs = [e["mean"][key] for e in entries.values()]
        spread = [0.0 if math.isnan(sd) else sd for _, sd in pairs]
        axes.barh(places, [0.0 if math.isnan(m) else m for m, _ in pairs], xerr=spread, color=colors)
        axes.set_title(title, fontsize=10)
    left.plot([e["mean"]["spearman"][0] for e in entries.values()], places, "kD", markersize=4, label="of ranks")
    uniform = [e["mean"]["uniform_share"][0] for e in entries.values()]
    middle.plot(uniform, places, "k|", markersize=12, label="uniform credit")
    ceiling = [c for c in result["ceiling"] if not math.isnan(c)]
    if ceiling:
        left.axvline(sum(ceiling) / len(ceiling), color="k", linestyle=":", linewidth=0.8, label="of ranks, at best")
    noise = [e["tokens_relative"][0] for e in entries.values()]
    right.scatter([x if x > 0 else math.nan for x in noise], places, color=colors)
    right.set_xscale("log")
    right.axvline(1, color="k", linewidth=0.8)
    right.set_title("tokens to signal = noise, baseline = 1", fontsize=10)
    for axes in (left, middle):
        axes.legend(fontsize=8, loc="lower right")
    left.set_yticks(places, names)
    left.invert_yaxis()
    for axes in (left, middle, right):
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, format="png")
