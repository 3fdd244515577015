"""Episodes that were played: their rows and metrics, and the kinds of faults that cut episodes off."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from creditgraph.components.rollouts.turn_rows import episode_returns
from creditgraph.pipeline.core.component import Count
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Trajectories, Turns

# Kinds of faults that end an episode; see the metric below.
FAULTS = ("time", "raised", "reply", "reward", "reset", "turns", "context", "replay")

EPISODE_METRICS = (
    Metric("episodes", "episodes", "episodes that had a turn"),
    Metric("turns", "turns", "turns of an episode, mean"),
    Metric("return", "reward", "sum of the rewards of an episode, mean over episodes without a fault"),
    Metric("faults", "episodes", "episodes that a fault cut off"),
    Metric(
        "faults_<kind>",
        "episodes",
        "of these, by kind: time (no reply in time), raised, reply (no text, or no step), reward (not a finite "
        "number), reset (ended at reset), turns (no end within `max_turns`), context (no room for another turn), "
        "replay (repeated turns led elsewhere); close: `close` failed, which costs no episode",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Played:
    """Turns of all episodes that had one, the number of faults of each kind, of the others too, and the place of each
    row's episode among those that were to be played, int64 [N]."""

    trajectories: Trajectories
    turns: Turns
    faults: Counter[str]
    entry: Tensor

    def metrics(self) -> dict[str, float]:
        """Values of `EPISODE_METRICS`."""
        value, first = episode_returns(self.turns)
        whole = first & torch.tensor([not fault for fault in self.turns.fault], dtype=torch.bool)
        return {
            "episodes": Count(first.sum()),
            "turns": len(self.turns) / max(int(first.sum()), 1),
            "return": float(value[whole].sum()) / max(int(whole.sum()), 1),
            "faults": Count(sum(count for kind, count in self.faults.items() if kind != "close")),
            **{f"faults_{kind}": Count(count) for kind, count in sorted(self.faults.items())},
        }
