"""Where methods help: properties of a family's policy and problems, and which of them separates gains from losses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from creditgraph.components.rollouts.thoughts import num_thoughts, thought_texts
from creditgraph.components.tasks import TASKS
from creditgraph.lab.evidence.across import Across
from creditgraph.pipeline.app.notebook.session import Composition
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories

Properties = dict[str, float]
"""Property → value; one that is not defined in a family is left out."""
PROMPTS = 64  # with eight responses each
FEWEST_FAMILIES = 6  # three to fit, three to test
MEANING = {
    "accuracy": "share of right responses",
    "silent": "share of groups of eight that are all right or all wrong",
    "choice": "nats of choice per thought, mean −log p of what was sampled: our reading of decision density",
    "error_place": "of responses with a wrong thought, the place of the first one as a share of all",
    "recovered": "of responses with a wrong thought, the share that ends right",
    "thoughts": "thoughts per response",
}


def properties(prompts: Prompts, rows: Trajectories, rewards: Rewards, tokenizer: Any) -> Properties:
    """The properties of `MEANING` of a batch of rollouts in groups."""
    correct, thoughts = rewards.correct.double(), num_thoughts(rows).double()
    _, place = torch.unique(rows.group, return_inverse=True)
    right = torch.zeros(int(place.max()) + 1, dtype=torch.float64).index_add_(0, place, correct)
    size = torch.bincount(place).double()
    found = {
        "accuracy": float(correct.mean()),
        "silent": float(((right == 0) | (right == size)).double().mean()),
        "choice": float(-rows.engine_logprobs.values.double().sum() / thoughts.sum()),
        "thoughts": float(thoughts.mean()),
    }
    problems = [prompts.metadata[row] for row in prompts.index_of(rows.prompt_uid).tolist()]
    steps = zip(problems, thought_texts(rows, tokenizer), strict=True)
    error = torch.tensor([TASKS[p["task"]].first_error(p, own) for p, own in steps])
    wrong = (error > 0) & (error <= thoughts)  # not those that end too early
    if bool(wrong.any()):
        found["recovered"] = float(correct[wrong].mean())
        found["error_place"] = float((error[wrong].double() / thoughts[wrong].clamp(min=1)).mean())
    return found


def measured_properties(settings: Sequence[str]) -> Properties:
    """The properties of a family, from rollouts of its model before training; seed 0.

    Args:
        settings: of the family, as `Lab.settings` gives them.
    """
    sizes = (f"prompts.batch={PROMPTS}", "sampler.group_size=8")
    with Composition(["recipe=toy_grpo", *settings, *sizes]).session() as session:
        out = session.step(learn=False)
        policy = out["engine.policy"]
        return properties(out["sampler.prompts"], out["sampler.trajectories"], out["rewards.rewards"], policy.tokenizer)


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The property that best separates families where a method gains, found on half of them.

    Attributes:
        method, baseline: as in `Across`.
        name, threshold, above: gains are predicted where the property is at least the threshold (`above`), or below it.
        fitted, tested: right predictions and families, of each half.
        majority: right predictions on the tested half by the fitted half's more frequent sign alone.
    """

    method: str
    baseline: str
    name: str
    threshold: float
    above: bool
    fitted: tuple[int, int]
    tested: tuple[int, int]
    majority: int


def split(families: Sequence[str]) -> tuple[list[str], list[str]]:
    """Every other family by name: those that are fitted, and those that are tested."""
    ordered = sorted(families)
    return ordered[::2], ordered[1::2]


def regime(gains: Across, known: Mapping[str, Properties]) -> Regime | None:
    """The rule with most right predictions on the fitted half; None without six families or a common property.

    Thresholds are midpoints of neighbouring values. Of rules that are equally often right the one with the widest gap
    at its threshold, relative to the property's range, is taken.
    """
    families = [f for f in gains.gains if f in known]
    fit, test = split(families)
    names = [n for n in MEANING if all(n in known[f] for f in families)]
    if len(families) < FEWEST_FAMILIES or not names:
        return None
    helped = {f: gains.gains[f] > 0 for f in families}

    def right(name: str, threshold: float, above: bool, where: Sequence[str]) -> int:
        return sum(helped[f] == ((known[f][name] >= threshold) == above) for f in where)

    best: tuple[int, float, str, float, bool] | None = None
    for name in names:
        values = sorted({known[f][name] for f in fit})
        for low, high in pairwise(values):
            gap, middle = (high - low) / (values[-1] - values[0]), (low + high) / 2
            for above in (True, False):
                score = right(name, middle, above, fit)
                if best is None or (score, gap) > best[:2]:
                    best = (score, gap, name, middle, above)
    if best is None:
        return None
    score, _, name, threshold, above = best
    common = 2 * sum(helped[f] for f in fit) >= len(fit)
    return Regime(
        method=gains.method,
        baseline=gains.baseline,
        name=name,
        threshold=threshold,
        above=above,
        fitted=(score, len(fit)),
        tested=(right(name, threshold, above, test), len(test)),
        majority=sum(helped[f] == common for f in test),
    )


def rounded(found: Properties) -> Properties:
    """Four significant digits; what is not a number is left out."""
    return {name: float(f"{value:.4g}") for name, value in found.items() if not math.isnan(value)}
