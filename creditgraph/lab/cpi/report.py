"""The whole laboratory in one call, and its table and figure."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from creditgraph.lab.cpi.bounds import Slope, loglog_slope, mean_slope
from creditgraph.lab.cpi.checks import ALGORITHMS, Rows, check_bound, check_sampled, count_better, count_checks
from creditgraph.lab.cpi.families import FAMILIES, random_shape
from creditgraph.lab.cpi.mdp import Floats
from creditgraph.lab.cpi.study import CRITERIA, label_curve, localiser_curve, sweep, tau_slopes

Generators = Callable[[int, str], np.random.Generator]
"""(seed, purpose) → generator."""

CLAIMED = {
    "gain/rr": 2.0,
    "gain/caro": 1.0,
    "gain_tau/rr": 2.0,
    "gain_tau/caro": 2.0,
    "labels/rr/step": -2.0,
    "labels/caro/step": 0.0,
    "labels/rr/bound": -2.0,
    "labels/caro/bound": 0.0,
}
"""Slopes that the paper claims; over p_π, except gain_tau (over τ)."""

NAMES = {
    "gain": "improvement over p",
    "gain_level": "improvement/A² over p",
    "gain_tau": "improvement over tau",
    "labels": "labels over p",
    "labels_level": "labels·A² over p",
    "draws": "resets drawn over p",
}


def measure_family(name: str, seeds: list[int], generators: Generators, knobs: int, repeats: int) -> dict[str, Any]:
    """All slopes of one family: {"slopes": quantity → Slope, "curves": one per seed, "decades": spans of p_π}."""
    family = FAMILIES[name]
    curves: list[dict[str, Any]] = []
    per_seed: dict[str, list[Slope]] = {}
    for seed in seeds:
        shape = random_shape(generators(seed, f"shape/{name}"))
        swept = sweep(family, shape, np.geomspace(5e-4, 0.12, knobs))
        curve = label_curve(family, shape, swept, generators(seed, f"labels/{name}"), repeats)
        of_tau = tau_slopes(family, shape, 0.01, np.geomspace(0.01, 0.35, knobs))
        at_level = swept.slopes(at_level=True)
        slopes = {"draws/caro": loglog_slope(swept.p, curve.draws)}
        for name, slope in swept.slopes().items():
            labels = curve.labels[name]
            slopes[f"gain/{name}"] = slope
            slopes[f"gain_level/{name}"] = at_level[name]
            slopes[f"gain_tau/{name}"] = of_tau[name]
            slopes[f"labels_level/{name}/step"] = loglog_slope(swept.p, labels["step"] * swept.level**2)
            slopes |= {f"labels/{name}/{c}": loglog_slope(swept.p, labels[c]) for c in CRITERIA}
        for quantity, slope in slopes.items():
            per_seed.setdefault(quantity, []).append(slope)
        curves.append(
            {"shape": asdict(shape), "tau": swept.tau, "p": swept.p, "level": swept.level, "gain": swept.gains}
        )
        curves[-1] |= {"labels": curve.labels, "draws": curve.draws}
    decades = [float(np.log10(c["p"].max() / c["p"].min())) for c in curves]
    return {
        "slopes": {q: mean_slope(s) for q, s in per_seed.items()},
        "per_seed": per_seed,
        "curves": curves,
        "decades": decades,
    }


def _ratios(rows: Rows, name: str) -> Floats:
    clear = rows[f"bound_{name}"] > 1e-10 * rows["scale"]
    ratios: Floats = rows[f"gain_{name}_exact"][clear] / rows[f"bound_{name}"][clear]
    return ratios


def _gather(parts: list[Rows]) -> Rows:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def measure(
    seeds: list[int], generators: Generators, knobs: int, repeats: int, num_mdps: int, sampled: dict[int, int]
) -> dict[str, Any]:
    """Everything that the laboratory measures, by name.

    Args:
        seeds: one set of MDPs and draws each.
        generators: of random numbers.
        knobs: values of p_π per family and seed.
        repeats: sampled iterations per label count.
        num_mdps: random MDPs for the bound, shared evenly between the seeds.
        sampled: labels → number of random MDPs for sampled iterations.
    """
    batch = 20
    rounds = -(-num_mdps // (batch * len(seeds)))
    checked: list[Rows] = []
    sampled_rows: dict[int, list[Rows]] = {k: [] for k in sampled}
    localiser = {}
    for seed in seeds:
        rng = generators(seed, "bound")
        checked += [check_bound(rng, batch) for _ in range(rounds)]
        for num, count in sampled.items():
            rng = generators(seed, f"sampled/{num}")
            sampled_rows[num] += [check_sampled(rng, 5, num) for _ in range(-(-count // (5 * len(seeds))))]
    for name, family in FAMILIES.items():
        shape = random_shape(generators(seeds[0], f"shape/{name}"))
        localiser[name] = localiser_curve(family, shape, 0.05, np.geomspace(0.003, 1, 13))
    rows = _gather(checked)
    reached = {}
    for num, parts in sampled_rows.items():
        joined = _gather(parts)
        shares = {k: float((joined[f"gain_{k}"] >= joined[f"bound_{k}"]).mean()) for k in ALGORITHMS}
        reached[num] = {"num": float(len(joined["p"])), **shares}
    return {
        "families": {name: measure_family(name, seeds, generators, knobs, repeats) for name in FAMILIES},
        "checks": count_checks(rows),
        "better": count_better(rows),
        "sampled": reached,
        "localiser": localiser,
        "ratios": {k: _ratios(rows, k) for k in ALGORITHMS},
        "quantiles": {k: np.quantile(rows[k], [0, 0.1, 0.5, 0.9, 1]) for k in ("p", "beta", "gamma")},
    }


def table(result: dict[str, Any]) -> str:
    """The measured slopes against the claimed ones, then the counts of the bound checks, as text."""
    lines = [f"{'family':<10} {'quantity':<24} {'variant':<12} {'slope':>8} {'± s.e.':>8} {'claimed':>8}"]
    for name, family in result["families"].items():
        order = list(NAMES)
        for quantity in sorted(family["slopes"], key=lambda q: order.index(q.partition("/")[0])):
            slope = family["slopes"][quantity]
            kind, _, variant = quantity.partition("/")
            claimed = f"{CLAIMED[quantity]:8.0f}" if quantity in CLAIMED else f"{'-':>8}"
            lines.append(f"{name:<10} {NAMES[kind]:<24} {variant:<12} {slope.value:8.3f} {slope.error:8.3f} {claimed}")
        lines.append(f"{name:<10} p spans {min(family['decades']):.2f} decades or more")
    heads = ("MDPs", "below", "A high", "below", "min gain/bound", "derived below", "min", "full step loses")
    widths = (6, 7, 8, 7, 16, 15, 7, 17)
    lines += [
        "",
        "bound on random MDPs".ljust(24)
        + "".join(head.rjust(width) for head, width in zip(heads, widths, strict=True)),
    ]
    for name, row in result["checks"].items():
        lines.append(
            f"{name:<24}{row['num']:6.0f}{row['violations']:7.0f}{row['num_fit']:8.0f}{row['violations_fit']:7.0f}"
            f"{row['min_ratio']:16.3f}{row['violations_sure']:15.0f}{row['min_ratio_sure']:7.3f}"
            f"{row['full_step_loses']:17.0f}"
        )
    for num, row in result["sampled"].items():
        lines.append(
            f"sampled iteration, {num} labels, {row['num']:.0f} MDPs: bound reached by random resets {row['rr']:.3f}, "
            f"oracle {row['oracle']:.3f}, localiser {row['localiser']:.3f}"
        )
    better = result["better"]
    lines.append(
        f"better than random resets iff (1-beta)gamma > p: {better['num']:.0f} MDPs, bounds agree "
        f"{better['agree_bounds']:.4f}, "
        f"exact gains agree {better['agree_gains']:.4f} (claimed but worse {better['claimed_but_worse']:.0f}, "
        f"better unclaimed {better['better_unclaimed']:.0f}, worse although (1-beta)gamma > 2p "
        f"{better['worse_above_2p']:.0f}; "
        f"the bounds with each MDP's own A agree {better['agree_own']:.4f})"
    )
    for name, (x, y) in result["localiser"].items():
        lines.append(f"{name}: exact gain equals that of random resets at (1-beta)gamma/p = {crossing(x, y):.3f}")
    return "\n".join(lines)


def crossing(x: Floats, y: Floats) -> float:
    """Where a rising curve y(x) passes 1, interpolated on log-log axes (nan where it does not)."""
    return float(np.exp(np.interp(0, np.log(y), np.log(x), left=np.nan, right=np.nan)))


def draw(result: dict[str, Any], folder: Path) -> None:
    """Writes cpi_lab.png: improvement, labels, localiser and bound ratios (first seed of each family)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    ((gain, labels), (local, ratio)) = figure.subplots(2, 2)
    for (name, family), color in zip(result["families"].items(), ("C0", "C1", "C2"), strict=True):
        curve = family["curves"][0]
        for key, style in {"rr": "o--", "caro": "s-"}.items():
            gain.loglog(
                curve["p"], curve["gain"][key], style, color=color, markersize=4, label=f"{name}, {key.upper()}"
            )
            labels.loglog(curve["p"], curve["labels"][key]["step"], style, color=color, markersize=4)
        labels.loglog(curve["p"], curve["draws"], ":", color=color)
        x, y = result["localiser"][name]
        local.loglog(x, y, "o-", color=color, markersize=4, label=name)
    p = np.array([1e-3, 1e-1])
    gain.loglog(p, 2e-3 * p, "k-", p, 2e-3 * p**2, "k--", linewidth=0.8)
    gain.set(
        xlabel="$p_\\pi$", ylabel="exact improvement of one iteration", title="Improvement (black: slopes 1 and 2)"
    )
    labels.loglog(p, 300 / p**2, "k--", linewidth=0.8)
    labels.set(xlabel="$p_\\pi$", ylabel="labels until the step size is right within one half")
    labels.set_title("Labels (black: slope −2; dotted: resets drawn by CARO)")
    local.axhline(1, color="k", linewidth=0.8)
    local.axvline(1, color="k", linewidth=0.8, linestyle=":")
    local.set(
        xlabel="$(1-\\beta)\\gamma/p_\\pi$",
        ylabel="localised gain / random-reset gain",
        title="Approximate localiser (dotted: claimed break-even)",
    )
    for name, values in result["ratios"].items():
        ratio.hist(np.log10(values), bins=50, histtype="step", label=name)
    ratio.axvline(0, color="k", linewidth=0.8)
    ratio.set(xlabel="log10(exact gain / claimed bound)", ylabel="random MDPs", title="The bound on random MDPs")
    for axes in (gain, local, ratio):
        axes.legend(fontsize=8)
    figure.savefig(folder / "cpi_lab.png", dpi=100)
