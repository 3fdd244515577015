"""What was measured and what the simulation predicts, as tables, as JSON, and as one sentence of advice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from creditgraph.components.sampler.failures import parse_split
from creditgraph.lab.localization.show import share_text
from creditgraph.lab.resets.gate import OWN, RANDOM, START, TRUE, Estimate, Gate
from creditgraph.lab.resets.simulation import Chains, Method, Ratio, relative_tokens, tokens_to_target, tuned
from creditgraph.pipeline.app.text import markdown_table, visible
from creditgraph.pipeline.core.streams import Stream

HALF = "half right"
# Where the true first error paid in trials on the embedded task and in the simulation; that of 2x4 is ours.
MOST_SUFFIX = 0.3
LEAST_OVER_RANDOM = 2.0
MOST_ATTEMPTS = {"1x4": 5.5, "2x4": 3.0, "1x8": 2.0}
MOST_SILENT = 0.4


@dataclass(frozen=True)
class Condition:
    """A measured number, its bound, and whether it holds; what is not defined does not."""

    name: str
    measured: Estimate
    bound: str
    holds: bool


def predict(gate: Gate) -> dict[str, dict[str, Ratio]]:
    """Split → kind of localisation → GRPO's tokens over those of resets, each at its best rate and groups per step.

    The error is the simulation's and that of what it is fitted to: the spread over resampled problems and responses,
    and over the localizer's share of right verdicts.
    """
    kinds: dict[str, Estimate | None] = {TRUE: Estimate(1.0, 0.0)}
    if OWN in gate.kinds:
        kinds[OWN] = gate.kinds[OWN].exact
    kinds |= {HALF: Estimate(0.5, 0.0), RANDOM: None}
    size, most = gate.group_size, gate.max_attempts
    grpo = tuned(gate.chains, Method(group_size=size))
    predicted: dict[str, dict[str, Ratio]] = {}
    for split in gate.attempts:
        for name, right in kinds.items():
            share = None if right is None else right.value
            method = Method(split=parse_split(split, size), right=share, group_size=size, max_attempts=most)
            predicted.setdefault(split, {})[name] = _predicted(gate, grpo, tuned(gate.chains, method), right)
    return predicted


def _predicted(gate: Gate, grpo: Method, method: Method, right: Estimate | None) -> Ratio:
    def simulated(chains: Chains, one: Method, seeds: int) -> Ratio:
        return relative_tokens(tokens_to_target(chains, grpo, seeds), tokens_to_target(chains, one, seeds))

    ratio = simulated(gate.chains, method, 32)
    noise = Stream("resets", 0).generator(draw="localizer").standard_normal(len(gate.resampled))
    values = []
    for chains, z in zip(gate.resampled, noise, strict=True):
        share = right and min(max(right.value + z * (0.0 if math.isnan(right.error) else right.error), 0.0), 1.0)
        values.append(simulated(chains, method if right is None else replace(method, right=share), 8).value)
    spread = float(np.nanstd(values, ddof=1)) if np.isfinite(values).sum() > 1 else math.nan
    return ratio if math.isnan(spread) else Ratio(ratio.value, math.hypot(ratio.error, spread))


def best_split(predicted: dict[str, dict[str, Ratio]]) -> tuple[str, str]:
    """The split that is predicted to save most, and the localisation by which: the localizer's, else the true one."""
    who = OWN if OWN in next(iter(predicted.values())) else TRUE
    return max(predicted, key=lambda split: -math.inf if math.isnan(v := predicted[split][who].value) else v), who


def conditions(gate: Gate, split: str) -> list[Condition]:
    """The four conditions for resets of this split to the true first error."""
    kind = gate.kinds[TRUE]
    silent = kind.silent[parse_split(split, gate.group_size).num_suffixes]
    bounds = (
        ("share of tokens in suffixes", kind.suffix_share, MOST_SUFFIX, True),
        ("V(true error)/V(random reset)", gate.over_random, LEAST_OVER_RANDOM, False),
        (f"attempts per prompt, {split}", gate.attempts[split], MOST_ATTEMPTS[split], True),
        (f"silent suffix groups, {split}", silent, MOST_SILENT, True),
    )
    return [
        Condition(name, x, f"{'≤' if at_most else '≥'} {bound:g}", x.value <= bound if at_most else x.value >= bound)
        for name, x, bound, at_most in bounds
    ]


def advice(gate: Gate, predicted: dict[str, dict[str, Ratio]]) -> str:
    """One sentence: whether resets should pay, by the simulation, and what speaks against it."""
    split, who = best_split(predicted)
    saved = predicted[split][who]
    if math.isnan(saved.value):
        return "The simulation gives no advice, because GRPO does not arrive in it: take easier problems first."
    error = 0.0 if math.isnan(saved.error) else saved.error
    failed = [f"{c.name} {number(c.measured)}, expected {c.bound}" for c in conditions(gate, split) if not c.holds]
    by = "the recipe's localizer" if who == OWN else "the true first error"
    need = f"with split {split} and {by}, GRPO is predicted to need {number(saved)} times the tokens of resets"
    if saved.value - 2 * error > 1:
        doubt = f"; against it: {'; '.join(failed)}" if failed else " and all four conditions hold"
        return f"Resets {'may' if failed else 'should'} pay: {need}{doubt}."
    true = max(kinds[TRUE].value for kinds in predicted.values())
    hope = f", though {true:.2f} with the true first error" if who == OWN and true > 1 else ""
    if saved.value + 2 * error < 1:
        return f"Stay with GRPO: at best, {need}{hope}."
    return f"Resets and GRPO should be level: at best, {need}{hope}."


def numbers(gate: Gate, predicted: dict[str, dict[str, Ratio]]) -> dict[str, Any]:
    """Everything, for JSON; a number is [value, standard error]."""
    split, _ = best_split(predicted)
    kinds = {name: vars(kind) for name, kind in gate.kinds.items()}
    shown = {name: value for name, value in vars(gate).items() if name not in ("chains", "resampled")}
    measured = shown | {"kinds": kinds}
    return {
        "measured": measured,
        "simulated": {
            "value": simulated_value(gate),
            "tokens_relative": predicted,
        },
        "conditions": [vars(c) for c in conditions(gate, split)],
        "advice": advice(gate, predicted),
    }


def simulated_value(gate: Gate) -> float:
    """Chance of a simulated response to be correct before training."""
    alive = gate.chains.value()
    return alive + (1 - alive) * gate.chains.recovery


def tables(name: str, gate: Gate, predicted: dict[str, dict[str, Ratio]]) -> str:
    """All numbers with standard errors, and the advice."""
    first = (
        f"{visible(name)}: {gate.problems} problems, {gate.responses} responses, {gate.failures} failures reset; true "
        f"first errors: {gate.truth}" + (f"; {gate.unverified} unverified, taken as wrong" if gate.unverified else "")
    )
    facts = [
        ("correct responses", number(gate.start) + f" (simulated: {share_text(simulated_value(gate))})"),
        (f"silent groups of GRPO, of {gate.group_size}", number(gate.silent)),
        ("recovery: correct from a prefix with the error", number(gate.recovery)),
        ("V(true error)/V(start)", number(gate.over_start)),
        ("V(true error)/V(random reset)", number(gate.over_random)),
    ]
    resets = [
        [reset, number(k.suffix_share), number(k.value), number(k.exact) if reset not in (TRUE, START) else ""]
        for reset, k in gate.kinds.items()
    ]
    shown = list(next(iter(predicted.values())))
    splits = [
        [
            split,
            number(gate.attempts[split]),
            *(number(gate.kinds[k].silent[parse_split(split, gate.group_size).num_suffixes]) for k in (TRUE, RANDOM)),
            *(number(kinds[k]) for k in shown),
        ]
        for split, kinds in predicted.items()
    ]
    split, _ = best_split(predicted)
    checks = [[c.name, number(c.measured), c.bound, "yes" if c.holds else "no"] for c in conditions(gate, split)]
    return "\n\n".join(
        [
            first,
            markdown_table(["measured", "± standard error"], [list(row) for row in facts]),
            markdown_table(["reset to", "suffix share", "suffix correct", "at the true error"], resets),
            markdown_table(
                ["split", "attempts", "silent: true", "silent: random", *(f"GRPO/resets: {k}" for k in shown)], splits
            ),
            "GRPO/resets: GRPO's sampled tokens over those of resets, by the simulation; 0: never. Each has the step\n"
            "size and the groups per step that are best for it. ± is the error of the simulation and of its inputs.",
            markdown_table([f"condition ({split})", "measured", "expected", "holds"], checks),
            advice(gate, predicted),
        ]
    )


def number(x: Estimate | Ratio) -> str:
    """ "1.41 ± 0.16"; "–" for NaN.

    >>> number(Estimate(0.5, float("nan")))
    '0.50'
    """
    if math.isnan(x.value):
        return "–"
    return f"{x.value:.2f}" + ("" if math.isnan(x.error) else f" ± {x.error:.2f}")
