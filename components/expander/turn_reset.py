"""Resets over turns: new episodes from the start of a recorded episode's turn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from creditgraph.components.rollouts.episodes import EpisodePlayer, EpisodeSettings
from creditgraph.components.rollouts.played import EPISODE_METRICS
from creditgraph.components.rollouts.requests import LENGTH_METRICS, SAMPLING_NAMES, keyed_seeds, length_metrics
from creditgraph.components.rollouts.turn_rows import RecordedTurn, by_episode, recorded_turns
from creditgraph.pipeline.core.component import Count, same_rows
from creditgraph.pipeline.core.handles import Environments, Policy
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, StepErrors, Trajectories, Turns, check_aligned
from creditgraph.pipeline.core.streams import keys_within


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The new turns of `suffixes` episodes per failure, whose group is the failure; repeated turns have no row.

    The `parent` of an episode's first row is that of the turn before it.
    """

    trajectories: Trajectories
    turns: Annotated[Turns, same_rows("trajectories")]


class TurnReset(EpisodePlayer):
    """Plays `suffixes` episodes per failure from the start of its localised turn h*, the turns before it repeated.

    A fresh environment answers the recorded texts of turns 1 … h*−1 again; where it then shows another prompt or state
    than was recorded, it is not determined by the turns, and the episode ends as a fault "replay". The return of a new
    episode is that of its new turns; what the repeated ones gave is the same for its group. Source: 2605.25507; over
    turns it is ours.
    """

    paper = "2605.25507"
    same_settings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "episodes": (*SAMPLING_NAMES, "max_turns", "episode_tokens", "history", "drop_until")
    }
    metrics = (
        *EPISODE_METRICS,
        *LENGTH_METRICS,
        Metric("repeated_turns", "turns", "recorded turns that environments answered again"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(EpisodeSettings):
        """Sampling of a turn, limits of an episode, and the number of suffixes."""

        suffixes: int = 4
        """new episodes per failure"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.suffixes < 1:
                raise ValueError(f"expected suffixes ≥ 1, got {self.suffixes}.")

    config: Config

    def run(
        self,
        *,
        prompts: Prompts,
        failures: Trajectories,
        errors: Annotated[StepErrors, same_rows("failures")],
        episodes: Trajectories,
        turns: Annotated[Turns, same_rows("episodes")],
        policy: Policy,
        environments: Environments,
    ) -> Outputs:
        """Plays all suffixes at once; `failures` are some of the `episodes`, by the uid of their first turn."""
        check_aligned(failures, errors)
        recorded = self._recorded(failures, errors, episodes, turns)
        self.context.log(repeated_turns=Count(sum(len(r) - 1 for r in recorded) * self.config.suffixes))
        if not recorded:
            none = torch.zeros(0, dtype=torch.int64)
            return Outputs(trajectories=episodes.select(none), turns=turns.select(none))
        settings = self.config
        owner = torch.arange(len(failures)).repeat_interleave(settings.suffixes)
        seed = keyed_seeds(self.context.rng(), keys_within(failures.prompt_uid), 0, settings.suffixes).reshape(-1)
        rows = prompts.index_of(failures.prompt_uid)[owner]
        table = self.table(prompts, policy, environments)
        played = table.play(rows, seed, [recorded[i] for i in owner.tolist()])
        entry = owner[played.entry]
        # Only a first row has a recorded turn above it; later ones may be more than the recorded episode has.
        begins = (played.turns.episode == played.turns.uid) & (played.turns.turn > 0)
        above = episodes.index_of(failures.uid)[entry] + played.turns.turn - 1
        parent = torch.where(begins, episodes.uid[torch.where(begins, above, 0)], -1)
        self.context.log(**played.metrics(), **length_metrics(played.trajectories))
        grown = played.trajectories.replace(group=failures.uid[entry], parent=parent)
        return Outputs(trajectories=grown, turns=played.turns)

    def _recorded(
        self, failures: Trajectories, errors: StepErrors, episodes: Trajectories, turns: Turns
    ) -> list[list[RecordedTurn]]:
        """The turns of each failure up to its localised one, which is at most its last."""
        lengths = by_episode(episodes, turns).lengths
        first = lengths.cumsum(0) - lengths
        start = episodes.index_of(failures.uid)
        count = lengths[torch.searchsorted(first, start)]
        return [
            recorded_turns(episodes, turns, range(row, row + max(number, 1)))
            for row, number in zip(start.tolist(), torch.minimum(errors.step, count).tolist(), strict=True)
        ]
