"""Credit from a self-teacher: the same policy with privileged context, read over the response (SDPO, RLSD)."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import INVALID, decimal, signed
from creditgraph.components.advantage.group import Outputs, training_mask
from creditgraph.components.advantage.teachers.teacher import candidates
from creditgraph.components.models.load import context_length
from creditgraph.components.rollouts.second_turn import encoded, problem_of
from creditgraph.components.rollouts.thoughts import steps_of, thought_texts
from creditgraph.components.text.templates import Mode, critique_prompt, hint_prompt
from creditgraph.pipeline.core.component import Component, Context, Count, same_rows
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Prompts, Rewards, Trajectories, check_aligned


def siblings(correct: Tensor, prompt: Tensor) -> Tensor:
    """int64 [N]: the next correct row of the same prompt after each row, around the end; −1 without another one.

    >>> siblings(torch.tensor([False, True, True, False, True]), torch.tensor([7, 7, 7, 9, 9])).tolist()
    [1, 2, 1, 4, -1]
    """
    members: dict[int, list[int]] = {}
    for row in correct.nonzero()[:, 0].tolist():
        members.setdefault(int(prompt[row]), []).append(row)
    chosen = []
    for row, uid in enumerate(prompt.tolist()):
        others = [other for other in members.get(uid, []) if other != row]
        chosen.append(next((other for other in others if other > row), others[0] if others else -1))
    return torch.tensor(chosen, dtype=torch.int64)


def magnitude(advantage: Tensor, gap: Tensor, mix: float, clip: float) -> Tensor:
    """A ((1 − λ) + λ clip(exp(sign(A) Δ), 1 − ε, 1 + ε)): the outcome gives the sign, the teacher the size; all [n].

    Args:
        advantage, gap: A and Δ of each token.
        mix, clip: λ and ε.
    """
    # Clamped before exp: beyond 1 + ε or below 1 − ε the clip decides anyway.
    weight = (advantage.sign() * gap).clamp(-20.0, 20.0).exp().clamp(1 - clip, 1 + clip)
    return advantage * ((1 - mix) + mix * weight)


def penalty(gap: Tensor) -> Tensor:
    """φ(Δ) = ½ (log(1 + e^Δ) − log 2) of each token [n]: 0 where the teacher changes nothing."""
    return (torch.nn.functional.softplus(gap) - math.log(2)) / 2


def annealed(mix: float, iteration: int, anneal: int) -> float:
    """λ max(0, 1 − iteration/anneal); λ itself where anneal is 0.

    >>> [annealed(0.5, iteration, 40) for iteration in (0, 10, 40, 60)], annealed(0.5, 60, 0)
    ([0.5, 0.375, 0.0, 0.0], 0.5)
    """
    return mix * max(0.0, 1 - iteration / anneal) if anneal else mix


class SelfTeacher(Component):
    """Credits each token with what the policy thinks of it once it knows more: Δ_t = log π(y_t | x, c, y_<t) −
    log π(y_t | x, y_<t).

    The privileged context c is, by `context`: another correct response to the problem (`sibling`), the dataset's
    solution (`solution`), or the response itself and the verdict on it (`critique`). One forward pass per response; the
    second log-prob is the sampler's. The wired policy is the teacher: the sampler's, or an average of its weights.

    - `gap`: A_t = Δ_t on the tokens of rows that have a teacher; others are not trained on. With objective `distill`
      the expected gradient is that of −KL(π(· | x, y_<t) ‖ π(· | x, c, y_<t)): SDPO (2601.20802) on sampled tokens.
      `top` adds the teacher's most likely tokens as candidates, over which, and all others as one, `distill` then has
      the divergence itself.
    - `weight`: the wired credit A becomes A ((1 − λ) + λ clip(exp(sign(A) Δ_t), 1 − ε, 1 + ε)): RLSD (2604.03128). The
      sign is the outcome's, so what the context gives away cannot turn it. All of it is second-hand: exp(sign(A) Δ)
      from summaries of the paper, λ = .5 and ε = .2 from five public ports, of which three let λ fall linearly to 0
      over 40 to 50 steps (`anneal`). Two of them renew the teacher every 5 to 10 steps; here it is the wired one.
    - `inverse`: as `weight` with exp(−Δ) on right rows, other rows keep the wired credit: RLRT (2605.10781), which
      rewards tokens that the policy chose and the teacher would not have. Second-hand: a reader's notes, ε of 1 for
      base models, .5 for instruct and .2 for thinking ones; λ = 1 is our reading.
    - `penalty`: A − λ φ(Δ), φ(Δ) = ½ (log(1 + e^Δ) − log 2), also where A is 0: AntiSD (2605.11609). Second-hand: a
      reader's notes. Its entropy gate is not built: the notes give no rule for it.

    A response without such a context, or without room for it in the model's context, has Δ = 0 (counted). One with an
    invalid reward gets zero credit. The words that show c are ours.
    """

    paper = "2601.20802"
    metrics = (
        Metric("scored_tokens", "tokens", "tokens of teacher-forced scoring, context included"),
        Metric("teacher_share", "share", "responses with a privileged context"),
        Metric("no_room", "rows", "responses whose privileged context does not fit into the model's context"),
        Metric("gap_mean", "nats", "Δ of a trained token that has a teacher, mean"),
        Metric("gap_abs_mean", "nats", "|Δ| of a trained token that has a teacher, mean"),
        Metric("candidates_mass", "share", "probability that the teacher gives to its candidates, mean; 0 without"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """What the teacher knows, and how its opinion becomes credit."""

        context: Literal["sibling", "solution", "critique"] = "sibling"
        """another correct response, the reference solution, or the verdict on the response"""
        form: Literal["gap", "weight", "inverse", "penalty"] = "gap"
        """the gap itself, or what it makes of the wired credit"""
        limit: float = 0.0
        """largest |Δ| of `gap` [nats]; 0 sets no limit"""
        top: int = 0
        """candidates per token of `gap`, the teacher's most likely ones; 0 uses the sampled tokens alone"""
        mix: float = 0.5
        """λ: 0 leaves the wired credit as it is"""
        anneal: int = 0
        """iterations over which λ falls linearly to 0; 0 keeps it"""
        clip: float = 0.2
        """ε of `weight` and `inverse`"""

        def __post_init__(self) -> None:
            if self.top < 0 or (self.top and self.form != "gap"):
                raise ValueError(f"expected top ≥ 0, and 0 unless form is 'gap', got {self.top} with '{self.form}'.")
            if min(self.limit, self.anneal) < 0 or not 0 <= self.mix <= 1 or not 0 <= self.clip <= 1:
                raise ValueError(
                    f"expected limit ≥ 0, 0 ≤ mix ≤ 1, 0 ≤ clip ≤ 1 and anneal ≥ 0, got {self.limit}, {self.mix}, "
                    f"{self.clip} and {self.anneal}."
                )

    config: Config

    @classmethod
    def needs_of(cls, config: Config) -> frozenset[str]:
        """The policy's own log-probs."""
        return frozenset({"logprobs"})

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """The other response, the solution or the response itself; the embedded model is shown it twice."""
        return 2

    @classmethod
    def misfits(cls, node: Any, graph: Any, model: Any, data: Any) -> list[str]:
        """A wire `credit` without use, or none where it is needed."""
        if (node.config.form != "gap") == ("credit" in node.wires):
            return []
        needs = "no wire there" if node.config.form == "gap" else "a wire to 'credit', which it changes"
        return [f"{node.name}.credit: expected {needs}, with form '{node.config.form}'. Change the wire or the form."]

    def setup(self, context: Context) -> None:
        """Reads the model's context length."""
        super().setup(context)
        self.room = context_length(context.model)

    def run(
        self,
        *,
        prompts: Prompts,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        policy: Policy,
        credit: Annotated[Credit, same_rows("trajectories")] | None = None,
    ) -> Outputs:
        """Credits one batch."""
        check_aligned(trajectories, rewards)
        settings = self.config
        tokens = trajectories.response_tokens
        gap, taught, columns = self._gap(prompts, trajectories, rewards, policy)
        if settings.form != "gap":
            if credit is None:
                raise ConfigError(f"node '{self.context.node}': form '{settings.form}' needs a wire to 'credit'.")
            check_aligned(trajectories, credit)
            made = credit.replace(advantage=tokens.with_values(self._changed(credit, gap, rewards)))
        else:
            values = gap.clamp(-settings.limit, settings.limit) if settings.limit else gap
            values = torch.where(rewards.valid[tokens.row_ids], values, 0.0)
            mask = training_mask(tokens, trajectories.inherited)
            mask = mask.with_values(mask.values & (taught & rewards.valid)[tokens.row_ids])
            made = Credit(uid=trajectories.uid, advantage=tokens.with_values(values), mask=mask, columns=columns)
        own = gap[made.mask.values & taught[tokens.row_ids]]
        count = max(len(own), 1)
        self.context.log(gap_mean=float(own.sum()) / count, gap_abs_mean=float(own.abs().sum()) / count)
        return Outputs(credit=made)

    def _changed(self, credit: Credit, gap: Tensor, rewards: Rewards) -> Tensor:
        """What the gap [tokens] makes of the wired credit."""
        settings, advantage, rows = self.config, credit.advantage.values, credit.advantage.row_ids
        mix = annealed(settings.mix, self.context.iteration, settings.anneal)
        if settings.form == "penalty":
            return torch.where(rewards.valid[rows], advantage - mix * penalty(gap), advantage)
        if settings.form == "weight":
            return magnitude(advantage, gap, mix, settings.clip)
        return torch.where(rewards.correct[rows], magnitude(advantage, -gap, mix, settings.clip), advantage)

    def _gap(
        self, prompts: Prompts, trajectories: Trajectories, rewards: Rewards, policy: Policy
    ) -> tuple[Tensor, Tensor, dict[str, Jagged]]:
        """Δ of each token, float32 [total], which rows have a teacher, bool [N], and the columns of candidates."""
        tokens = trajectories.response_tokens
        texts = self._contexts(prompts, trajectories, rewards, policy.tokenizer)
        known = torch.tensor([text is not None for text in texts], dtype=torch.bool)
        shown = encoded(policy.tokenizer, [text for text in texts if text is not None])
        fits = shown.lengths + tokens.lengths[known] <= self.room
        taught = known.clone()
        taught[known] = fits
        gap = torch.zeros(len(tokens.values))
        shown = shown.select(fits)
        scored = tokens.select(taught)
        own = taught[tokens.row_ids]
        columns: dict[str, Jagged] = {}
        mass = 0.0
        # Rows without a teacher have columns too, or parts of a batch would not have the same ones.
        if len(scored) or self.config.top:
            scores = policy.score(shown, scored, trajectories.temperature, top=self.config.top)
            gap[own] = scores.logprobs.values - trajectories.engine_logprobs.values[own]
            columns, mass = candidates(scores, tokens, own)
        self.context.log(
            candidates_mass=mass,
            scored_tokens=Count(len(shown.values) + len(scored.values)),
            teacher_share=float(taught.sum()) / max(len(taught), 1),
            no_room=Count(len(fits) - int(fits.sum())),
        )
        return gap, taught, columns

    def _contexts(
        self, prompts: Prompts, trajectories: Trajectories, rewards: Rewards, tokenizer: Any
    ) -> list[str | None]:
        """The teacher's prompt for each response, None without one."""
        attempts = thought_texts(trajectories, tokenizer)
        mode: Mode = "thought" if len(trajectories.thought_ends.values) else "plain"
        other = siblings(rewards.correct & rewards.valid, trajectories.prompt_uid).tolist()
        made: list[str | None] = []
        for i, row in enumerate(prompts.index_of(trajectories.prompt_uid).tolist()):
            asked = problem_of(prompts, row)
            if self.config.context == "critique":
                right = bool(rewards.correct[i])
                text = critique_prompt(*asked, attempts[i], right, tokenizer, mode) if rewards.valid[i] else None
            else:
                known = steps_of(prompts.solution[row]) if self.config.context == "solution" else []
                hint = attempts[other[i]] if self.config.context == "sibling" and other[i] >= 0 else known
                text = hint_prompt(*asked, hint, tokenizer, mode) if hint else None
            made.append(text)
        return made

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The formula, and the tokens that gained and lost most."""
        settings = self.config
        formula = "Δ = log π(y | x, c) − log π(y | x)"
        if settings.form == "penalty":
            formula = f"A − {decimal(settings.mix)}·½(log(1 + exp(Δ)) − log 2)"
        elif settings.form != "gap":
            power = "±Δ" if settings.form == "weight" else "−Δ"
            mix = decimal(settings.mix)
            formula = f"A·((1 − {mix}) + {mix}·clip(exp({power}), 1 ± {settings.clip}))"
        rows = outputs["credit"].advantage.rows()
        ranges = [f"from {signed(float(r.min()))} to {signed(float(r.max()))}" if len(r) else "no tokens" for r in rows]
        lines = [f"{formula}, c the {settings.context}: {text}" for text in ranges]
        return [line if ok else INVALID for line, ok in zip(lines, inputs["rewards"].valid.tolist(), strict=True)]
