"""The table and the figure of creditgraph creditbench."""

import math
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.text import markdown_table
from creditgraph.pipeline.core.errors import extra

# Column head, place of the number in an entry. Gradient columns carry a standard error, the others a standard deviation
# over seeds.
COLUMNS: tuple[tuple[str, tuple[str, str]], ...] = (
    ("spearman", ("mean", "spearman")),
    ("pearson", ("mean", "pearson")),
    ("sign", ("mean", "sign")),
    ("on 1st error", ("mean", "error_share")),
    ("names it", ("mean", "named")),
    ("bias", ("mean", "bias")),
    ("grad cosine", ("gradient", "cosine")),
)
COSTS = ("noise", "sampled", "credit: sampled", "scored", "processed", "seconds")


def cell(pair: tuple[float, float], digits: int) -> str:
    """ "0.41 ±0.03"; no spread where it is not known, "-" where the number is not."""
    value, spread = pair
    if math.isnan(value):
        return "-"
    return f"{value:.{digits}f}" + ("" if math.isnan(spread) else f" ±{spread:.{digits}f}")


def thousands(value: float) -> str:
    """ "12.3k"."""
    return f"{value / 1000:.1f}k"


def table(result: dict[str, Any]) -> str:
    """One row per method, as a Markdown table, and below it what the true values were."""
    head = ["method", "rollouts", *(name for name, _ in COLUMNS), *COSTS]
    text = markdown_table(head, [_cells(name, entry) for name, entry in result["methods"].items()])
    truths = result["truth"]
    average = {k: sum(t[k] for t in truths) / len(truths) for k in truths[0]}
    ceiling = mean_ceiling(result)
    after_error = f", after the first error {average['value_after_error']:.3f}"
    after_error = "" if math.isnan(average["value_after_error"]) else after_error
    lines = [
        text,
        "",
        f"{len(truths)} seeds; accuracy of the rollouts {average['accuracy']:.3f}; value at sound prefixes "
        f"{average['value_sound']:.3f}{after_error}; "
        f"{100 * average['clear_share']:.0f} % of thoughts have |A| ≥ 0.1.",
        f"True values cost {thousands(average['sampled_tokens'])} tokens per seed over {average['states']:.0f} states. "
        + ("" if math.isnan(ceiling) else f"Their noise limits perfect credit to a Spearman of {ceiling:.2f}."),
    ]
    lines += [f"Failed: {name} ({problem})." for name, problem in result["failed"].items()]
    return "\n".join(lines)


def _cells(name: str, entry: dict[str, Any]) -> list[str]:
    mean = entry["mean"]
    cells = [name, "own" if entry.get("own_rollouts") else "given"]
    cells += [cell(entry[part][key], 2) for _, (part, key) in COLUMNS]
    cells.append(cell(entry["tokens_relative"], 2))
    if "rollout_tokens" not in mean:  # the true values have no cost of their own
        return [*cells, *["-"] * (len(COSTS) - 1)]
    sampled = mean["rollout_tokens"][0] + mean["credit_sampled"][0]
    cells += [thousands(sampled), *(thousands(mean[f"credit_{k}"][0]) for k in ("sampled", "scored", "processed"))]
    return [*cells, cell(mean["credit_seconds"], 2)]


def mean_ceiling(result: dict[str, Any]) -> float:
    """Mean over seeds of the largest rank correlation that the noise of the true values allows; NaN when unknown."""
    known = [c for c in result["ceiling"] if not math.isnan(c)]
    return sum(known) / len(known) if known else math.nan


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the figure: correlations, share on the first error, and gradient noise at equal sampled tokens.

    Methods with shared rollouts are blue, those with their own are orange, and true values are grey.
    """
    with extra("plots", "creditbench"):
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

    entries = result["methods"].values()
    figure = Figure(figsize=(12, 1.2 + 0.32 * len(entries)), dpi=110, layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    places = list(range(len(entries)))
    colors = [{None: "tab:gray", True: "tab:orange", False: "tab:blue"}[e.get("own_rollouts")] for e in entries]
    for axes, key, title in (
        (left, "pearson", "correlation with the true advantage"),
        (middle, "error_share", "share of |credit| on the 1st wrong thought"),
    ):
        pairs = [e["mean"][key] for e in entries]
        values, spread = ([0.0 if math.isnan(x) else x for x in column] for column in zip(*pairs, strict=True))
        axes.barh(places, values, xerr=spread, color=colors)
        axes.set_title(title, fontsize=10)
    left.plot([e["mean"]["spearman"][0] for e in entries], places, "kD", markersize=4, label="of ranks")
    uniform = [e["mean"]["uniform_share"][0] for e in entries]
    middle.plot(uniform, places, "k|", markersize=12, label="uniform credit")
    ceiling = mean_ceiling(result)
    if not math.isnan(ceiling):
        left.axvline(ceiling, color="k", linestyle=":", linewidth=0.8, label="of ranks, at best")
    noise = [e["tokens_relative"][0] for e in entries]
    right.scatter([x if x > 0 else math.nan for x in noise], places, color=colors)
    right.set_xscale("log")
    right.axvline(1, color="k", linewidth=0.8)
    right.set_title("tokens to signal = noise, baseline = 1", fontsize=10)
    left.set_yticks(places, list(result["methods"]))
    left.invert_yaxis()
    for axes in (left, middle):
        axes.legend(fontsize=8, loc="lower right")
    for axes in (left, middle, right):
        axes.grid(axis="x", alpha=0.3)
    colors_mean = (
        ("tab:blue", "the shared rollouts"),
        ("tab:orange", "rollouts of its own"),
        ("tab:gray", "true values"),
    )
    handles = [Patch(color=color, label=text) for color, text in colors_mean]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, fontsize=8, title="credit for", title_fontsize=8
    )
    figure.savefig(path)
