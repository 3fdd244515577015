"""The value of a state as the probability of reference answers or solutions after it, without generation (RREDCoT)."""

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from creditgraph.components.value.bank import (
    AnswerSettings,
    Bank,
    answer_bank,
    continuation_bank,
    drawn_bank,
    references_of,
    solution_bank,
)
from creditgraph.components.value.boundaries import (
    VALUE_METRICS,
    Boundaries,
    Outputs,
    boundaries_of,
    branch_tokens,
    shared_sequences,
)
from creditgraph.components.value.estimator import AnswerEstimator, log_pooled, log_probability
from creditgraph.components.value.states import states_of
from creditgraph.pipeline.core.component import Context, same_rows
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Segments, SegmentValues, Trajectories

logger = logging.getLogger("creditgraph")

_ANSWER_TOKENS = 64  # of exit text and answer, for `costs`; ours
_LARGEST = 80.0  # log of the largest value: a float32 holds e^88
Value = Literal["immediate", "continuation", "sum", "solution"]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Scored:
    """Values of boundaries, and the number of tokens that estimating them cost.

    Attributes:
        log: float64 [B], log v̂ of each boundary [nats], −inf for 0.
        known: bool [B], whether all of its references fit into the context.
        tokens: number of tokens that went through the model.
    """

    log: Tensor
    known: Tensor
    tokens: int


def carried(values: Tensor, known: Tensor, rows: Jagged) -> Tensor:
    """`values` [B] with unknown ones (bool [B]) replaced by the last known value before them in their row.

    Where there is none before, −inf, the log of 0.
    """
    source = torch.where(known, torch.arange(len(known)), -1).cummax(0).values
    return torch.where(source >= rows.offsets[:-1][rows.row_ids], values[source.clamp(min=0)], -torch.inf)


class AnswerLikelihood(AnswerEstimator):
    """Estimates v̂(s) = (1/N) Σ_{(u, y) in bank} w p(u, y | s) ζ(y) by scoring reference texts (u, y) after the state.

    All boundaries of a trajectory are scored with one prefill.

    - `immediate` (default, our reconstruction): u is the exit text, whose own probability is left out: P(y | s, exit
      text).
    - `solution` (second-hand: notes on the paper): a fixed bank of (question, solution, answer): p(u | s) p(y | s, u)
      with u the reference solution, the same at every state of a problem; then the exit text, which does not count, and
      the answer y.
    - `continuation`: (u, y) is the rest of a correct trajectory of the same problem, after as many thoughts as s has.
      At the end of a response nothing follows: the value is ζ of a correct response, else 0. End segments at thoughts.
    - `sum`: `immediate` and `continuation`, at most 1.

    No reference follows the tokens that end a response, and the exit text closes no thinking that is closed. Products
    are computed as logs, which go with the values: those too small for a float32 still count in redistribution.

    With weights `proposal`, w = 1/q: importance sampling over completions that the policy drew with probability q
    (second-hand: notes on the paper, its equation 10 and appendix C.5). v̂ is then unbiased if q covers every rewarded
    completion, else E[v̂] < v, and single estimates may exceed 1. A constant w cancels in redistribution, and so does
    1/q of a single reference; over several references they differ.

    Second-hand: the bank is the dataset's answer or, without one, the answers of the group's own correct trajectories;
    the formula. Our reconstruction: `immediate`, geometric means, the weights `distinct` and `mean`, the alignment by
    thoughts, whole correct responses as solutions where the dataset has none.

    Over `distinct` products `continuation` is biased low unless the bank holds every rewarded continuation: E[v̂] ≤ v.
    Geometric means keep long answers comparable but are no bound. An empty bank gives 0 everywhere, hence no gains and
    uniform redistribution. A state without room for exit text and answer in the context has the value of the previous
    one.
    """

    metrics = (
        *VALUE_METRICS,
        *AnswerEstimator.metrics,
        Metric(
            "no_room",
            "boundaries",
            "boundaries without room for a reference in the context, which have the value of the previous one",
        ),
        Metric(
            "underflow",
            "boundaries",
            "boundaries whose value is too small for a float32 and so 0; redistribution counts them by their logs",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(AnswerSettings):
        """The bank and the form of the value."""

        value: Value = "immediate"
        """probability of the answer at once, of the rest of a correct solution (requires rewards), of both, or of the
        reference solution and answer"""
        weights: Literal["distinct", "mean", "proposal"] = "distinct"
        """w: distinct sums products of different references (w = N, of geometric means and solutions 1); mean: 1;
        proposal: 1/q with every draw, for products of continuations"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.weights == "proposal" and (self.value != "continuation" or self.length_normalise):
                raise ValueError(
                    "weights: expected value 'continuation' and length_normalise false with 'proposal', as q is known "
                    f"of what the policy drew, got '{self.value}' and {self.length_normalise}. Set both, or weights."
                )

    config: Config

    @classmethod
    def needs_of(cls, config: Config) -> frozenset[str]:
        """The probability q of what was drawn."""
        return frozenset({"logprobs"} if config.weights == "proposal" else ())

    @classmethod
    def costs(cls, node: Any, graph: Any) -> list[str]:
        """The cost of scoring a reference at every boundary of the longest responses."""
        drawing = graph[node.wires["prompts"][0].source]
        while "prompts" in drawing.wires:  # a sampler returns the prompts that it was given
            drawing = graph[drawing.wires["prompts"][0].source]
        prompts = drawing.config
        sampler, segmenter = (graph[node.wires[socket][0].source].config for socket in ("trajectories", "segments"))
        names = ((prompts, "batch"), (prompts, "max_tokens"), (sampler, "group_size"), (sampler, "max_tokens"))
        if not all(hasattr(config, name) for config, name in (*names, (segmenter, "segments"))):
            return []
        cost = planned_cost(
            rows=prompts.batch * sampler.group_size,
            prompt=prompts.max_tokens,
            response=sampler.max_tokens,
            segments=segmenter.segments,
            reference=_ANSWER_TOKENS if node.config.value == "immediate" else sampler.max_tokens,
        )
        return [
            f"scores at most {cost.requests:,} references per iteration, {cost.sent / 1e6:,.2f} M tokens with what is "
            f"before them; behind a prefix cache {cost.prefilled / 1e6:,.2f} M of these pass through the model, "
            f"{cost.prefilled_cached / 1e6:,.2f} M where it still holds the responses"
        ]

    def setup(self, context: Context) -> None:
        """Reads the model's context length."""
        super().setup(context)
        self._warned = False

    def run(
        self,
        *,
        prompts: Prompts,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
        policy: Policy,
        rewards: Annotated[Rewards, same_rows("trajectories")] | None = None,
    ) -> Outputs:
        """Scores all boundaries of all trajectories."""
        settings = self.config
        bounds = boundaries_of(trajectories, segments, rewards)
        log = torch.full((len(bounds.owner),), -torch.inf, dtype=torch.float64)
        empty = torch.ones(len(trajectories), dtype=torch.bool)
        tokens = 0
        if settings.value != "continuation":
            solutions = settings.value == "solution"
            references = references_of(prompts, trajectories, rewards, settings, solutions)
            states = states_of(policy.tokenizer, bounds, bounds.owner, bounds.at, bounds.trunk.lengths[bounds.owner])
            bank = (solution_bank if solutions else answer_bank)(policy.tokenizer, references, states, settings)
            scored = self._score(policy, bounds, states.begin, bank, trajectories.temperature)
            log = carried(scored.log, scored.known, bounds.place)
            tokens += scored.tokens
            empty &= bounds.place.with_values(bank.entries.lengths).sum() == 0
            self.context.log(no_room=float((~scored.known).sum()))
        if settings.value in ("continuation", "sum"):
            if rewards is None:
                raise ConfigError(
                    f"node '{self.context.node}': value '{settings.value}' takes continuations from correct "
                    "trajectories and expected an input 'rewards', but none is wired. Wire rewards.rewards, or set "
                    "value to 'immediate'."
                )
            made = drawn_bank if settings.weights == "proposal" else continuation_bank
            bank = made(trajectories, rewards, bounds.place, settings.references)
            scored = self._score(policy, bounds, bounds.at, bank, trajectories.temperature)
            ended = torch.where(rewards.correct & rewards.valid, rewards.value.double().clamp(min=0.0), 0.0)
            log = torch.logaddexp(log, torch.where(bounds.last, torch.log(ended)[bounds.owner], scored.log))
            tokens += scored.tokens
            empty &= bounds.place.with_values(bank.entries.lengths).sum() == 0
        if settings.value == "sum":
            # The two terms are probabilities of overlapping events.
            log = log.clamp(max=0.0)
        self.log_cost(tokens, empty)
        value = log.exp().float()
        self._log_values(value, log)
        place = bounds.place
        return Outputs(
            values=SegmentValues(uid=trajectories.uid, values=place.with_values(value), logs=place.with_values(log))
        )

    def _log_values(self, value: Tensor, log: Tensor) -> None:
        underflow = int(((value == 0) & (log > -torch.inf)).sum())
        count = len(value)
        self.context.log(mean=float(value.double().sum()) / max(count, 1), boundaries=count, underflow=underflow)
        if underflow and not self._warned:
            self._warned = True
            logger.warning(
                "node '%s': %d of %d values are products of probabilities below 1e-45, and 0 as a float32. "
                "advantage.redistribute counts them by their logs, other advantages as 0. Set length_normalise: true, "
                "or take fewer tokens per reference.",
                self.context.node,
                underflow,
                count,
            )

    def _score(self, policy: Policy, bounds: Boundaries, at: Tensor, bank: Bank, temperature: float) -> _Scored:
        """Scores the references of each boundary, after `at` [B] tokens of its trunk; `bank` has a row per boundary."""
        place = bank.entries.row_ids
        fits = at[place] + bank.tokens.lengths[bank.entries.values] <= self.room
        known = torch.ones(len(bank.entries), dtype=torch.bool)
        known[place[~fits]] = False
        row = bounds.owner[place[fits]]
        branch = at[place[fits]]
        entry = bank.entries.values[fits]
        # Responses of one prompt often begin alike: equal sequences are scored once.
        once, member = shared_sequences(bounds.trunk, row, branch, bank.tokens.select(entry))
        tokens = bank.tokens.select(entry[once])
        scores = policy.score_branches(bounds.trunk, row[once], branch[once], tokens, temperature)
        normalise = self.config.length_normalise
        logprob = log_probability(scores.logprobs.select(member), bank.scored.select(entry), normalise)
        if bank.proposal is not None:
            logprob = logprob - bank.proposal[fits]
        mean = normalise or self.config.value == "solution" or self.config.weights != "distinct"
        log = log_pooled(logprob, bank.reward[fits], place[fits], len(bank.entries), mean, bank.draws)
        log = log.clamp(max=_LARGEST)
        return _Scored(log=log, known=known, tokens=branch_tokens(row[once], branch[once], tokens))


BLOCK = 16  # tokens in a block of vLLM's prefix cache on GPUs; a cached prefix consists of whole blocks


@dataclass(frozen=True, kw_only=True)
class BranchCost:
    """Counts of scoring branches.

    Attributes:
        requests: one per branch.
        sent: tokens in the requests, contexts included.
        prefilled: tokens that pass through the model, if the cache holds no trunk before.
        prefilled_cached: the same, if it holds all of them, as where they were just sampled and nothing was evicted.
        scored: positions whose log-probs over the vocabulary are computed.
    """

    requests: int
    sent: int
    prefilled: int
    prefilled_cached: int
    scored: int


def branch_cost(row: Tensor, at: Tensor, tokens: Tensor, block: int = BLOCK) -> BranchCost:
    """Cost of `Policy.score_branches` on engines behind a prefix cache, which send a trunk's longest branch first.

    A branch of n tokens after a tokens of its trunk finds the ⌊(a − 1) / block⌋ whole blocks before the position that
    predicts its first token, and prefills the other a + n − block ⌊(a − 1) / block⌋ tokens. Without the trunk in the
    cache, the longest branch of each trunk prefills all a + n. Trunks are counted as if they shared nothing.

    Args:
        row: int64 [B], trunk of each branch.
        at: int64 [B], tokens of the trunk before it, at least 1.
        tokens: int64 [B], its tokens.
        block: tokens in a block of the cache.

    >>> branch_cost(torch.tensor([0, 0]), torch.tensor([100, 40]), torch.tensor([5, 5]), block=32)
    BranchCost(requests=2, sent=150, prefilled=118, prefilled_cached=22, scored=10)
    """
    sent = at + tokens
    found = (at - 1) // block * block
    own = int((sent - found).sum())
    longest = torch.zeros(int(row.max()) + 1 if len(row) else 0, dtype=torch.int64)
    longest = longest.scatter_reduce(0, row, found, "amax", include_self=True)
    return BranchCost(
        requests=len(row),
        sent=int(sent.sum()),
        prefilled=own + int(longest.sum()),
        prefilled_cached=own,
        scored=int(tokens.sum()),
    )


def planned_cost(
    *, rows: int, prompt: int, response: int, segments: int, reference: int, block: int = BLOCK
) -> BranchCost:
    """Cost of scoring one reference at the start of every response and at the end of each of its equal segments.

    Args:
        rows: trajectories.
        prompt, response: tokens of each.
        segments: of each response.
        reference: tokens of the scored text, its exit text included.
        block: see `branch_cost`.
    """
    places = prompt + response * torch.arange(segments + 1) // segments
    row = torch.arange(rows).repeat_interleave(len(places))
    return branch_cost(row, places.repeat(rows), torch.full((len(row),), reference), block)
