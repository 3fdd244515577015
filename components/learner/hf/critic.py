"""`value.critic`: a value head on the policy's architecture, trained as `learner.hf` trains a policy."""

import logging
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from creditgraph.components.learner.hf.model import LearnerModel, hidden_states
from creditgraph.components.learner.hf.settings import HFSettings
from creditgraph.components.learner.hf.sharding import Entry, Sharding
from creditgraph.components.learner.hf.side_model import SIDE_METRICS, SideModel, SideSettings
from creditgraph.components.learner.objective import LossInputs, Meters, Objective, ObjectiveSettings
from creditgraph.components.learner.packing.pack import PackedBatch
from creditgraph.components.learner.step import Result, RolloutTraining
from creditgraph.components.rollouts.segments import check_segments, generalised_advantage, segment_starts
from creditgraph.components.rollouts.turn_rows import by_episode, check_episode_rewards, next_values, turn_gae
from creditgraph.pipeline.core.component import Context, same_rows
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import (
    Credit,
    Rewards,
    Segments,
    SegmentValues,
    Trajectories,
    Turns,
    check_aligned,
)

logger = logging.getLogger("creditgraph")

# Values that explain less than this of the returns' variance are worse than any constant: the critic diverges.
DIVERGED = -1.0


ONE_WIRE = "expected one of the wires 'segments' and 'turns', got both or neither. Wire one of them."


class ValueClip(Objective):
    """½ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) at each state, V being `logprobs` and R the `advantage`.

    PPO's value loss as its implementations have it (2005.12729). `RolloutTraining` moves and packs numbers per response
    token whatever they mean: here the value of the state before the token.
    """

    needs_credit: ClassVar[bool] = False  # a return of 0 is a target too

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Bound of the change."""

        clip: float = 0.2
        """ε; 0 does not clip"""

    config: Config

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per state."""
        value, old, target = inputs.logprobs.values, inputs.old_logprobs.values, inputs.advantage.values
        loss = (value - target).square()
        if self.config.clip:
            clipped = (old + (value - old).clamp(-self.config.clip, self.config.clip) - target).square()
            meters.share("clip_fraction", clipped.detach() > loss.detach(), inputs.mask.values)
            loss = torch.maximum(loss, clipped)
        return 0.5 * loss


class ValueModel(LearnerModel):
    """A causal LM whose output head is one linear unit: a value per state, where `LearnerModel` has log-probs."""

    def _check_head(self) -> None:
        """Its head is ours."""

    def _score(self, entry: Entry, batch: PackedBatch, temperature: float) -> tuple[Jagged, Jagged]:
        values = entry.run(_values, batch, self.packs)
        return batch.by_row(values, torch.zeros_like(values))


def _values(model: Any, batch: PackedBatch, packs: bool) -> Tensor:
    head = model.get_output_embeddings()
    hidden = batch.predicting(hidden_states(model, batch, packs))
    return nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float()).squeeze(-1)


def with_value_head(model: Any) -> Any:
    """Replaces the output head by one unit with weights 0, so that all values begin at 0 and no draw is needed."""
    width = model.get_output_embeddings().weight.shape[1]
    device = model.get_input_embeddings().weight.device
    head = nn.Linear(width, 1, device="cpu" if device.type == "meta" else device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """A value at the start of each response and at each segment end; of turns at both ends."""

    values: Annotated[SegmentValues, same_rows("trajectories")]


class Critic(SideModel):
    """Learns v(s) at segment boundaries with a model of its own, and gives the values before each update.

    The values are those of the weights before this iteration's steps; the end of a response has its own reward. Then it
    is trained towards R_k = v(s_k) + A_k, A being GAE with `lam` (λ = 1: the discounted reward), by the clipped value
    loss. With `turns` in place of `segments` a state is the start of a turn, GAE runs over the turns of an episode with
    their rewards, and the end of a turn has the value of the next one's start, 0 after the last (Turn-PPO, 2512.17008;
    second-hand). States inside an inherited prefix and rows with an invalid reward are not trained on. Steps with a
    non-finite loss or gradient change no weight and are counted; a critic whose values explain nothing of the returns
    is said.
    """

    paper = "1707.06347"
    metrics = (
        Metric("mean", "reward", "mean value over the states it was trained on, before the update"),
        Metric(
            "explained_variance", "share", "1 − Var(R − v)/Var(R) over these states; left out where all R are equal"
        ),
        Metric(
            "diverged", "1", "1 in an iteration whose values explain less than −1 of the variance, or are no numbers"
        ),
        Metric("nonfinite", "rows", "rows with a value that is not finite; they are not trained on"),
        Metric("states", "states", "states trained on"),
        Metric("loss", "reward²", "value loss, mean over optimiser steps"),
        Metric("clip_fraction", "share", "states whose loss is that of the clipped value"),
        *SIDE_METRICS,
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SideSettings):
        """Targets, loss and optimiser."""

        gamma: float = 1.0
        """γ of the targets, per segment or turn; as in the advantage"""
        lam: float = 1.0
        """λ of the targets: 1 is the discounted reward (VAPO's decoupled GAE)"""
        clip: float = 0.2
        """ε, largest change of a value that the loss rewards, in units of the reward; 0 does not clip"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 <= self.lam <= 1 or not 0 <= self.gamma <= 1 or self.clip < 0:
                raise ValueError(
                    f"expected 0 ≤ lam ≤ 1, 0 ≤ gamma ≤ 1 and clip ≥ 0, got {self.lam}, {self.gamma} and {self.clip}."
                )

        def loss(self) -> ObjectiveSettings:
            """The clipped value loss."""
            return ObjectiveSettings(use=f"{__name__}:ValueClip", config={"clip": self.clip})

    config: Config

    @classmethod
    def misfits(cls, node: Any, graph: Any, model: Any, data: Any) -> list[str]:
        """Segments and turns, or neither."""
        return [f"{node.name}: {ONE_WIRE}"] if ("segments" in node.wires) == ("turns" in node.wires) else []

    def setup(self, context: Context) -> None:
        """Loads the model and makes the optimiser."""
        super().setup(context)
        self._said = False

    def wrapped(self, model: Any, settings: HFSettings, shards: tuple[Sharding, str] | None) -> LearnerModel:
        """With a value head."""
        return ValueModel(
            with_value_head(model),
            recompute=settings.recompute,
            slow_attention=settings.compute.slow_attention,
            shards=shards,
        )

    def run(
        self,
        *,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        segments: Annotated[Segments | None, same_rows("trajectories")] = None,
        turns: Annotated[Turns | None, same_rows("trajectories")] = None,
    ) -> Outputs:
        """Gives the values, then trains; all ranks call it, each with the rows of its replica."""
        check_aligned(trajectories, rewards)
        self.context.slots.begin()
        settings = self.config.training()
        tokens = trajectories.response_tokens
        nothing = tokens.with_values(torch.zeros(len(tokens.values), dtype=torch.bool))
        targets = Credit(uid=trajectories.uid, advantage=nothing.to(torch.float32), mask=nothing)
        starts = self._starts(trajectories, rewards, segments, turns)
        training = RolloutTraining(settings, self.context, self.backend, trajectories, targets, self.version)
        with training.clock("values"):
            old = training.score(reference=False)
        place = tokens.offsets[:-1][starts.row_ids] + starts.values
        states = starts.with_values(old.values[place])
        values, returns = self._returns(states, trajectories, rewards, turns)
        finite = values.with_values(~torch.isfinite(values.values)).sum() == 0
        if turns is not None:
            episode = by_episode(trajectories, turns)
            finite = episode.spread(episode.with_values(~finite).sum() == 0).values
        trained = (finite & rewards.valid)[starts.row_ids] & (starts.values >= trajectories.inherited[starts.row_ids])
        target, mask = torch.zeros(len(tokens.values)), nothing.values.clone()
        target[place[trained]] = returns.values[trained]
        mask[place[trained]] = True
        targets = Credit(uid=trajectories.uid, advantage=tokens.with_values(target), mask=tokens.with_values(mask))
        # The old values are to the loss what the engine's log-probs are to a policy's; no weights sampled them.
        rows = trajectories.replace(
            engine_logprobs=old,
            policy_version=torch.full_like(trajectories.policy_version, -1),
            token_versions=None,
            routed_experts=None,
        )
        fit = RolloutTraining(settings, self.context, self.backend, rows, targets, self.version)
        result = fit.run()
        self.version += 1
        self.trained_tokens += result.tokens
        self._log(result, training.seconds | fit.seconds, returns.values[trained], states.values[trained], finite)
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=values))

    def _starts(
        self, trajectories: Trajectories, rewards: Rewards, segments: Segments | None, turns: Turns | None
    ) -> Jagged:
        """The states: response tokens before each segment, or before each turn that has tokens; int64."""
        if segments is not None and turns is None:
            check_segments(trajectories, segments)
            return segment_starts(segments.ends)
        if segments is not None or turns is None:
            raise ConfigError(f"node '{self.context.node}': {ONE_WIRE}")
        check_episode_rewards(rewards, turns)
        filled = (trajectories.response_tokens.lengths > 0).long()
        return Jagged.from_lengths(torch.zeros(int(filled.sum()), dtype=torch.int64), filled)

    def _returns(
        self, states: Jagged, trajectories: Trajectories, rewards: Rewards, turns: Turns | None
    ) -> tuple[Jagged, Jagged]:
        """The values at boundaries, and the target v + A of each state, both float32."""
        config = self.config
        if turns is None:
            ends = torch.ones_like(trajectories.response_tokens.lengths)
            values = states.join(Jagged.from_lengths(rewards.value.float(), ends))
            advantage = generalised_advantage(values, rewards.value, config.gamma, config.lam).values
        else:
            episodes = by_episode(trajectories, turns)
            value = torch.zeros(len(turns)).index_copy(0, states.row_ids, states.values)
            both = torch.stack([value, next_values(value, episodes)], 1)
            values = Jagged.from_lengths(both.reshape(-1), torch.full((len(turns),), 2))
            advantage = turn_gae(episodes, value.double(), config.gamma, config.lam)[states.row_ids].float()
        return values, states.with_values(advantage + states.values)

    def _log(self, result: Result, seconds: dict[str, float], returns: Tensor, values: Tensor, finite: Tensor) -> None:
        """Logs numbers of all replicas, and warns once of a critic that diverges."""
        error = returns.double() - values.double()
        sums = (torch.tensor(len(error)), values.sum(), returns.sum(), error.sum(), (~finite).sum())
        count, value, target, gap, nonfinite = self.context.all_sum(torch.stack([s.double() for s in sums])).tolist()
        count = max(count, 1.0)
        squares = torch.stack(
            [(returns.double() - target / count).square().sum(), (error - gap / count).square().sum()]
        )
        spread, left = self.context.all_sum(squares).tolist()
        explained = 1 - left / spread if spread > 0 else None
        found = result.metrics
        diverged = nonfinite > 0 or found["skipped_nonfinite"] > 0 or (explained is not None and explained < DIVERGED)
        names = {"steps": "updates", "skipped_nonfinite": "skipped_updates", "trained_tokens": "states"}
        kept = {names.get(n, n): found[n] for n in (*names, "loss", "clip_fraction", "grad_norm", "lr") if n in found}
        kept |= {f"seconds_{phase}": value for phase, value in seconds.items()}
        if explained is not None:
            kept["explained_variance"] = explained
        self.context.log(mean=value / count, nonfinite=nonfinite, diverged=float(diverged), **kept)
        if diverged and not self._said:
            self._said = True
            shown = "an unknown share" if explained is None else f"{explained:.3g}"
            node = self.context.node
            logger.warning(
                f"node '{node}': the critic diverges: in iteration {self.context.iteration} its values explain {shown} "
                f"of the returns' variance (expected above {DIVERGED:g}), {nonfinite:g} rows have values that are not "
                f"finite, {found['skipped_nonfinite']:g} steps were left out. Lower {node}.optimizer.lr, or let it "
                "learn before the policy (warmup of advantage.gae)."
            )
