"""The localisation study as tables for a terminal, as JSON, and as one figure."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditgraph.lab.localization.gradient_signal import BINS, Signal
from creditgraph.lab.localization.labels import Labels
from creditgraph.lab.localization.study import Share, Study, bin_names
from creditgraph.pipeline.app.text import markdown_table, visible
from creditgraph.pipeline.core.errors import extra

CLEAN = "#2b6cb0"
EXACT = "#1a365d"
ERRONEOUS = "#dd6b20"
KINDS = {"base": "base responses", "suffix": "suffixes of failures"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the command found.

    Attributes:
        run: its name.
        iterations: recorded iterations with a localised failure.
        failures: number of failures that the labels were asked for.
        labels: the true first errors; None when no node localises.
        study: statistics of the labelled failures; None when no node localises.
        signal: kind of response → its gradient signal.
        min_words: of a step that counts in a deviation.
    """

    run: str
    iterations: int
    failures: int
    labels: Labels | None
    study: Study | None
    signal: dict[str, Signal]
    min_words: int


def numbers(result: Result) -> dict[str, Any]:
    """All results, for JSON (`creditgraph.pipeline.run.metrics.plain` makes NaN null)."""
    out: dict[str, Any] = {"run": result.run, "iterations": result.iterations, "failures": result.failures}
    study = result.study
    if study is not None and result.labels is not None:
        out |= {
            "truth": result.labels.name,
            "labelled": len(result.labels.step),
            "unlabelled": dict(result.labels.unlabelled),
            "also_out_of_range": result.labels.out_of_range,
            "min_words": result.min_words,
            "clean": study.clean.numbers() | {"random_reset": study.random_clean},
            "exact": study.exact.numbers() | {"random_reset": study.random_exact},
            "deviations": study.deviations,
            "corrections": [
                {
                    "resets": c.name,
                    "failures": c.failures,
                    "suffixes": c.suffixes.numbers(),
                    "corrected": c.corrected.numbers(),
                }
                for c in study.corrections
            ],
        }
    return out | {"gradient_signal": {name: signal.numbers() for name, signal in result.signal.items()}}


def tables(result: Result) -> str:
    """The tables, with Wilson 95 % intervals."""
    parts = []
    if result.study is not None and result.labels is not None:
        parts += _localization(result, result.study, result.labels)
    if result.signal:
        head = ["trained on", "responses", "without signal", "trained tokens", "coefficient"]
        rows = [
            [
                KINDS[name] if len(result.signal) > 1 else "all responses",
                f"{signal.responses:,}",
                share_text(signal.silent / signal.responses),
                f"{int(signal.tokens[0].sum()):,}",
                f"{1000 * signal.mean:.3f}",
            ]
            for name, signal in result.signal.items()
        ]
        parts.append(markdown_table(head, rows))
        parts.append("coefficient: |A|/T·(1−π) of the policy gradient in 1/1,000, mean over trained tokens")
    return "\n\n".join(parts)


def _localization(result: Result, study: Study, labels: Labels) -> list[str]:
    lost = "".join(f", {count} {why}" for why, count in sorted(labels.unlabelled.items()))
    first = (
        f"{visible(result.run)}: {result.failures} failures of {result.iterations} recorded iterations; true first "
        f"error from {visible(labels.name)}: {len(labels.step)} labelled{lost}"
    )
    if labels.out_of_range:
        first += f" ({labels.out_of_range} labelled answers also name a number out of range)"
    counted = f"steps of {result.min_words} words and more" if result.min_words else "steps"
    shares = markdown_table(
        [f"resets (deviation in {counted})", "failures", "share", "95 %", "of random resets"],
        [
            ["clean: at or before the first error", *_cells(study.clean), share_text(study.random_clean)],
            ["exact: at the first error", *_cells(study.exact), share_text(study.random_exact)],
        ],
    )
    rows = [[c.name, f"{c.failures}", *_cells(c.suffixes), *_cells(c.corrected)] for c in study.corrections]
    head = ["deviation", "failures", "suffixes correct", "share", "95 %", "failures corrected", "share", "95 %"]
    return [first, shares, markdown_table(head, rows)]


def _cells(share: Share) -> list[str]:
    low, high = share.interval
    ends = "–" if math.isnan(low) else f"{share_text(low)}–{share_text(high)}"
    return [f"{share.count} of {share.total}", share_text(share.value), ends]


def share_text(value: float) -> str:
    """A share with three digits: ".250", "1.000"; "–" for NaN."""
    return "–" if math.isnan(value) else f"{value:.3f}".removeprefix("0")


def draw(result: Result, path: Path) -> None:
    """Writes the figure, in the format of the path's suffix; the panels of what was not measured are left out."""
    with extra("plots", "localization"):
        from matplotlib.figure import Figure

    study = result.study if result.study is not None and result.study.clean.total else None
    rows = (study is not None) + bool(result.signal)
    figure = Figure(figsize=(11, 0.4 + 3.6 * max(rows, 1)), dpi=110, layout="constrained")
    axes = figure.subplots(max(rows, 1), 2, squeeze=False)
    title = result.run + (f": true first error from {result.labels.name}" if result.labels else "")
    figure.suptitle(title, fontsize=10, parse_math=False)
    if study is not None:
        _draw_deviations(axes[0][0], study)
        _draw_corrections(axes[0][1], study)
    if result.signal:
        _draw_signal(axes[-1], result.signal)
    for panel in axes.flat:
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    figure.savefig(path)


def _draw_deviations(panel: Any, study: Study) -> None:
    total = study.clean.total
    color = {True: ERRONEOUS, False: CLEAN}
    places = list(study.deviations)
    panel.bar(
        places,
        [count / total for count in study.deviations.values()],
        color=[EXACT if d == 0 else color[d > 0] for d in places],
        width=0.85,
    )
    panel.set_title(
        f"clean {share_text(study.clean.value)} (random {share_text(study.random_clean)}), "
        f"exact {share_text(study.exact.value)} (random {share_text(study.random_exact)}), {total} failures",
        fontsize=10,
    )
    panel.set_xlabel("localised step − true first error: before (blue), at (dark), after (orange)")
    panel.set_ylabel("share of failures")
    panel.xaxis.get_major_locator().set_params(integer=True)


def _draw_corrections(panel: Any, study: Study) -> None:
    names = bin_names()
    by_name = {c.name: c for c in study.corrections}
    for shift, attribute, marker, color, label in (
        (-0.12, "suffixes", "o", "tab:green", "suffixes that end correct"),
        (0.12, "corrected", "s", "tab:purple", "failures with such a suffix"),
    ):
        shares: list[tuple[int, Share]] = [(i, getattr(by_name[name], attribute)) for i, name in enumerate(names)]
        known = [(i, share) for i, share in shares if share.total]
        values = [share.value for _, share in known]
        # Rounding may put an end a hair on the wrong side of the share.
        below = [max(0.0, share.value - share.interval[0]) for _, share in known]
        above = [max(0.0, share.interval[1] - share.value) for _, share in known]
        panel.errorbar(
            [i + shift for i, _ in known],
            values,
            yerr=[below, above],
            fmt=marker,
            color=color,
            capsize=3,
            markersize=5,
            label=label,
        )
    panel.set_xticks(range(len(names)), names)
    panel.set_ylim(-0.02, 1.02)
    panel.set_title("correction rate, Wilson 95 %", fontsize=10)
    panel.set_xlabel("localised step − true first error")
    panel.legend(fontsize=8)


def _draw_signal(panels: Any, signals: dict[str, Signal]) -> None:
    centers = [(i + 0.5) / BINS for i in range(BINS)]
    names = (("by_position", "place in the response, prefix included"), ("by_probability", "probability π"))
    for axis, (key, name) in enumerate(names):
        for kind, signal in signals.items():
            means = [1000 * value for value in signal.numbers()[key]["mean"]]
            label = KINDS[kind] if len(signals) > 1 else "all responses"
            panels[axis].plot(centers, means, marker="o", markersize=4, label=label)
        panels[axis].set_xlim(0, 1)
        panels[axis].set_ylim(bottom=0)
        panels[axis].set_xlabel(name)
        panels[axis].set_title("1,000·|A|/T·(1−π), mean per trained token", fontsize=10)
        panels[axis].legend(fontsize=8)
