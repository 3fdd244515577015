"""Credit from a teacher with weights of its own (on-policy distillation)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import signed
from creditgraph.components.advantage.group import Outputs, training_mask
from creditgraph.components.models.load import load_tokenizer
from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.handles import Policy, Scores
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Trajectories


def candidates(scores: Scores, tokens: Jagged, scored: Tensor) -> tuple[dict[str, Jagged], float]:
    """Columns "candidate_i" and "teacher_logprob_i" of `tokens`, 0 where they were not `scored`, and their mean mass.

    Args:
        scores: of the scored tokens, in order.
        tokens: all response tokens.
        scored: bool [total].
    """
    columns: dict[str, Jagged] = {}
    if scores.top_tokens is None or scores.top_logprobs is None:
        return columns, 0.0
    for i, (ids, logprobs) in enumerate(zip(scores.top_tokens.int().T, scores.top_logprobs.T, strict=True)):
        for name, values in ((f"candidate_{i}", ids), (f"teacher_logprob_{i}", logprobs)):
            column = values.new_zeros(len(scored))
            column[scored] = values
            columns[name] = tokens.with_values(column)
    return columns, float(scores.top_logprobs.exp().sum()) / max(int(scored.sum()), 1)


class Teacher(Component):
    """Credits each token with log q(y_t) − log π(y_t), q being the wired policy: an engine with a model of its own.

    With objective `distill` this is on-policy distillation: the student samples, the teacher judges every token. `top`
    adds the teacher's most likely tokens of each place as candidates (columns "candidate_i" and "teacher_logprob_i"),
    over which the objective then computes the divergence. π is the sampler's log-prob. The teacher needs the run's
    vocabulary.
    """

    paper = "2306.13649"
    metrics = (
        Metric("gap_mean", "nats", "log q − log π of a trained token, mean; minus the reverse KL, estimated"),
        Metric("teacher_logprob", "nats", "log q of a trained token, mean"),
        Metric("candidates_mass", "share", "probability that the teacher gives to its candidates, mean; 0 without"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """How much of the teacher's distribution is used."""

        top: int = 0
        """candidates per token, the teacher's most likely ones; 0 uses the sampled tokens alone"""

        def __post_init__(self) -> None:
            if self.top < 0:
                raise ValueError(f"expected top ≥ 0, got {self.top}.")

    config: Config
    _checked: bool = False

    @classmethod
    def needs_of(cls, config: Config) -> frozenset[str]:
        """The policy's own log-probs."""
        return frozenset({"logprobs"})

    def run(self, *, trajectories: Trajectories, policy: Policy) -> Outputs:
        """Credits one batch."""
        self._check_vocabulary(policy)
        tokens = trajectories.response_tokens
        mask = training_mask(tokens, trajectories.inherited)
        scores = policy.score(trajectories.prompt_tokens, tokens, trajectories.temperature, top=self.config.top)
        gap = scores.logprobs.values - trajectories.engine_logprobs.values
        every = torch.ones(len(gap), dtype=torch.bool)
        columns, mass = candidates(scores, tokens, every)
        trained = mask.values
        count = max(int(trained.sum()), 1)
        self.context.log(
            gap_mean=float(gap[trained].sum()) / count,
            teacher_logprob=float(scores.logprobs.values[trained].sum()) / count,
            candidates_mass=mass,
        )
        advantage = tokens.with_values(gap)
        return Outputs(credit=Credit(uid=trajectories.uid, advantage=advantage, mask=mask, columns=columns))

    def _check_vocabulary(self, policy: Policy) -> None:
        """Raises DataError unless the teacher has the run's tokens, once."""
        if self._checked:
            return
        own, its = load_tokenizer(self.context.model).get_vocab(), policy.tokenizer.get_vocab()
        if own != its:
            different = len(dict(own.items() ^ its.items()))
            raise DataError(
                f"node '{self.context.node}': expected a teacher with the vocabulary of model.path "
                f"'{self.context.model.path}', whose tokens it judges, got one that differs in {different} of "
                f"{len(own)} tokens. Choose a teacher of the same family."
            )
        self._checked = True

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """The formula, and its range in each response."""
        rows = outputs["credit"].advantage.rows()
        ranges = [f"from {signed(float(r.min()))} to {signed(float(r.max()))}" if len(r) else "no tokens" for r in rows]
        return [f"log q(y) − log π(y) of the teacher q: {text}" for text in ranges]
