"""Failed episodes as responses whose thoughts are their turns, for localizers of thoughts."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from creditgraph.components.rollouts.turn_rows import by_episode
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, Turns, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One row per chosen episode, whose uid is that of its first turn."""

    failures: Trajectories


def joined_turns(trajectories: Trajectories, first: Tensor, last: Tensor) -> Trajectories:
    """Episodes as single responses: turns from `first` to `last` (rows, [E]), with the observations between them.

    A thought is a turn, with the observation before it. Log-probs and entropies of observations are NaN. Raises
    AlignmentError where a turn's prompt does not begin with the whole conversation before it.
    """
    prompts, responses = trajectories.prompt_tokens.to_lists(), trajectories.response_tokens.to_lists()
    logprobs, entropies = trajectories.engine_logprobs.to_lists(), trajectories.entropies.to_lists()
    rows: dict[str, list[list[float]]] = {"tokens": [], "logprobs": [], "entropies": [], "ends": []}
    for begin, end in zip(first.tolist(), last.tolist(), strict=True):
        tokens = list(prompts[begin])
        known: list[list[float]] = [[], []]
        ends = []
        for row in range(begin, end + 1):
            if prompts[row][: len(tokens)] != tokens:
                raise AlignmentError(
                    f"trajectory {int(trajectories.uid[row])}: expected a prompt that begins with the whole "
                    "conversation before it, got another one; set the sampler's history to 'all' and drop_until to ''."
                )
            between = [torch.nan] * (len(prompts[row]) - len(tokens))
            tokens = prompts[row] + responses[row]
            known = [known[0] + between + logprobs[row], known[1] + between + entropies[row]]
            ends.append(len(tokens) - len(prompts[begin]))
        for name, values in zip(rows, (tokens[len(prompts[begin]) :], *known, ends), strict=True):
            rows[name].append(values)
    return trajectories.select(first).replace(
        response_tokens=Jagged.from_rows(rows["tokens"], torch.int32),
        engine_logprobs=Jagged.from_rows(rows["logprobs"], torch.float32),
        entropies=Jagged.from_rows(rows["entropies"], torch.float32),
        thought_ends=Jagged.from_rows(rows["ends"], torch.int32),
        finish_reason=[trajectories.finish_reason[row] for row in last.tolist()],
        text=["".join(trajectories.text[a : b + 1]) for a, b in zip(first.tolist(), last.tolist(), strict=True)],
    )


class FailedEpisodes(Component):
    """Chooses the first `failures` failed episodes of each prompt, in the order sampled; valid and not correct."""

    paper = "2605.25507"
    metrics = (
        Metric("failures", "episodes", "failed episodes that were chosen"),
        Metric("prompts", "prompts", "prompts with a failed episode"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """How many."""

        failures: int = 1
        """failed episodes per prompt, fewer where fewer failed"""

        def __post_init__(self) -> None:
            if self.failures < 1:
                raise ValueError(f"expected failures ≥ 1, got {self.failures}.")

    config: Config

    def run(
        self,
        *,
        trajectories: Trajectories,
        turns: Annotated[Turns, same_rows("trajectories")],
        rewards: Annotated[Rewards, same_rows("trajectories")],
    ) -> Outputs:
        """Joins the turns of each chosen episode."""
        check_aligned(trajectories, rewards)
        episodes = by_episode(trajectories, turns)
        first, last = episodes.offsets[:-1], episodes.offsets[1:] - 1
        failed = (rewards.valid & ~rewards.correct)[first].tolist()
        seen: dict[int, int] = {}
        chosen = []
        for episode, prompt in enumerate(trajectories.prompt_uid[first].tolist()):
            if failed[episode] and seen.get(prompt, 0) < self.config.failures:
                seen[prompt] = seen.get(prompt, 0) + 1
                chosen.append(episode)
        index = torch.tensor(chosen, dtype=torch.int64)
        self.context.log(failures=Count(len(chosen)), prompts=Count(len(seen)))
        return Outputs(failures=joined_turns(trajectories, first[index], last[index]))
