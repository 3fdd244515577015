"""Payloads, the values on wires: frozen dataclasses whose tensors no receiver may change.

A *batch* has one row per prompt or trajectory and a `uid` that is unique in a run. Fields of a batch are, by their
value: a `Tensor` whose first dimension is the rows, a `Jagged` with one row per row, a list with one Python value per
row, a dict of named `Jagged` columns, or a plain number or string that belongs to the whole batch. Arrow and Parquet
conversion (`creditgraph.pipeline.run.recording`) follows from that and from nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged, concat_rows, num_rows, select_rows
from creditgraph.pipeline.core.shown import Shown


@dataclass(frozen=True, eq=False)
class Payload:
    """Anything that may travel on a wire. `origin` ("node.output") is set by the executor and used in error texts."""

    origin: ClassVar[str] = ""

    def storable(self) -> Payload:
        """The same value without anything alive, for a checkpoint."""
        return self


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Batch(Shown, Payload):
    """Rows with unique ids.

    Attributes:
        uid: int64 [N], unique in a run.
    """

    uid: Tensor

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            rows = num_rows(value)
            if rows is not None and rows != len(self.uid):
                raise AlignmentError(
                    f"{type(self).__name__}.{name}: {rows} rows, but uid has {len(self.uid)}; every field needs one "
                    "row per uid."
                )

    def __len__(self) -> int:
        return len(self.uid)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def select(self, index: Tensor) -> Self:
        """Rows by an int64 index or a bool mask [N], in the order of the index."""
        if index.dtype == torch.bool:
            index = index.nonzero(as_tuple=True)[0]
        fields = {f.name: select_rows(getattr(self, f.name), index) for f in dataclasses.fields(self)}
        return type(self)(**fields)

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """Stacks rows in order. Batch-wide numbers must agree; columns must have the same names."""
        if not batches:
            raise AlignmentError(f"{cls.__name__}.concat: no batches; expected at least one.")
        fields = {
            f.name: concat_rows(f"{cls.__name__}.{f.name}", [getattr(b, f.name) for b in batches])
            for f in dataclasses.fields(cls)
        }
        return cls(**fields)

    def index_of(self, uid: Tensor) -> Tensor:
        """int64 [M]: the row of each given uid; raises AlignmentError when one is missing."""
        # uids are unique but in no order: sorted once, each lookup is a binary search.
        order = torch.argsort(self.uid)
        place = torch.searchsorted(self.uid[order], uid)
        rows = order[place.clamp(max=max(len(order) - 1, 0))] if len(order) else torch.zeros_like(uid)
        if len(uid) and (len(order) == 0 or not torch.equal(self.uid[rows], uid)):
            missing = set(uid.tolist()) - set(self.uid.tolist())
            raise AlignmentError(
                f"{self.origin or type(self).__name__}: no row for uid {sorted(missing)[:3]}… ({len(missing)} "
                "missing); "
                "expected every referenced uid. Wire both inputs to the same iteration and population."
            )
        return rows


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Prompts(Batch):
    """Problems to solve.

    Attributes:
        tokens: Jagged int32, the prompt as the model sees it.
        text: the same before tokenisation.
        answer: reference answer, "" when there is none.
        metadata: per-row dict of JSON values: task name, source row, choices, tests, ….
        solution: worked reference solution, "" when there is none; left out, all rows have none.
    """

    tokens: Jagged
    text: list[str]
    answer: list[str]
    metadata: list[dict[str, Any]]
    solution: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.solution:
            object.__setattr__(self, "solution", [""] * len(self.uid))
        super().__post_init__()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Trajectories(Batch):
    """Sampled responses.

    Attributes:
        prompt_uid: int64 [N], uid of the prompt in `Prompts`.
        group: int64 [N], trajectories whose outcomes are compared with each other share it.
        parent: int64 [N], uid of the trajectory whose prefix was inherited, −1 for none.
        prompt_tokens: Jagged int32.
        response_tokens: Jagged int32, inherited prefix included, stop strings and EOS included.
        inherited: int64 [N], number of leading response tokens copied from the parent.
        engine_logprobs: Jagged float32 over response tokens, nats, at the sampling temperature, before top-p/top-k
            truncation.
        entropies: Jagged float32 over response tokens, nats, of the same distribution.
        thought_ends: Jagged int32, exclusive end of each thought as an index into the response tokens.
        policy_version: int64 [N], version of the weights that sampled the new tokens; the oldest where several did.
        finish_reason: "stop", "eos", "length", "thoughts" or "final" per row, see `Completions`.
        text: decoded response, special tokens kept.
        temperature: sampling temperature of the whole batch (1 for greedy); learners compute their log-probs at it.
        token_versions: Jagged int32 over response tokens, version of the weights that sampled each token, set by
            samplers that carry rollouts over iterations; None if `policy_version` holds for all tokens of a row.
        routed_experts: Jagged uint8 or int16, the experts of each token of prompt and response but the last, as its
            engine chose them: layers × experts per token, one token after the other. A row of which they are not known
            is empty; None: of no row.
    """

    prompt_uid: Tensor
    group: Tensor
    parent: Tensor
    prompt_tokens: Jagged
    response_tokens: Jagged
    inherited: Tensor
    engine_logprobs: Jagged
    entropies: Jagged
    thought_ends: Jagged
    policy_version: Tensor
    finish_reason: list[str]
    text: list[str]
    temperature: float = 1.0
    token_versions: Jagged | None = None
    routed_experts: Jagged | None = None

    @classmethod
    def concat(cls, batches: Sequence[Self]) -> Self:
        """Stacks rows in order; what only some batches have of `token_versions` and `routed_experts` is filled in."""
        if any(b.token_versions is not None for b in batches):
            batches = [b.replace(token_versions=b.versions_by_token()) for b in batches]
        if any(b.routed_experts is not None for b in batches):
            batches = [b.replace(routed_experts=b.routed_experts or no_experts(len(b))) for b in batches]
        return super().concat(batches)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields replaced; with other tokens, the experts of the old ones are dropped."""
        if not {"prompt_tokens", "response_tokens"}.isdisjoint(changes):
            changes.setdefault("routed_experts", None)
        return super().replace(**changes)

    def experts_of_first(self, length: Tensor) -> Jagged | None:
        """`routed_experts` of rows whose responses are cut to `length` [N] tokens."""
        experts = self.routed_experts
        if experts is None:
            return None
        before = self.prompt_tokens.lengths - 1
        width = experts.lengths // (before + self.response_tokens.lengths).clamp(min=1)
        return experts.slice_rows(torch.zeros_like(length), (before + length).clamp(min=0) * width)

    def versions_by_token(self) -> Jagged:
        """`token_versions`, or `policy_version` for every token of its row."""
        if self.token_versions is not None:
            return self.token_versions
        return self.response_tokens.spread(self.policy_version.to(self.response_tokens.values.device, torch.int32))


def no_experts(rows: int) -> Jagged:
    """`Trajectories.routed_experts` of rows of which none are known."""
    return Jagged(torch.zeros(0, dtype=torch.uint8), torch.zeros(rows + 1, dtype=torch.int64))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Rewards(Batch):
    """Outcome of each trajectory.

    Attributes:
        value: float32 [N].
        correct: bool [N].
        valid: bool [N], False where verification failed (exception, time-out, NaN): such a trajectory gets zero credit.
        detail: per-row reason, "" without one.
    """

    value: Tensor
    correct: Tensor
    valid: Tensor
    detail: list[str]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Turns(Batch):
    """Which turn of which episode each trajectory is: one row per turn, uids are those of the trajectories.

    Turns of an episode are consecutive rows in their order; `Trajectories.group` is the same for all turns of all
    episodes of one problem.

    Attributes:
        episode: int64 [N], uid of the episode's first turn.
        turn: int64 [N], place in the episode, from 0.
        state: per row, a key of the environment's state before the turn; equal keys are equal states, "" is unknown.
        reward: float32 [N], what the environment gave for the turn.
        done: bool [N], the environment ended the episode with this turn.
        fault: per row, why its episode was cut off by a fault (the same for all its turns), "" without one.
    """

    episode: Tensor
    turn: Tensor
    state: list[str]
    reward: Tensor
    done: Tensor
    fault: list[str]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StepErrors(Batch):
    """First wrong step of each (failed) trajectory.

    Attributes:
        step: int64 [N], 1-based thought index.
        source: per row, how it was determined: "boxed", "step", "default", "uniform", "oracle", "wrong".
    """

    step: Tensor
    source: list[str]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Segments(Batch):
    """Segment boundaries of each response.

    Attributes:
        ends: Jagged int32, exclusive ends, strictly increasing; the last one is the response length.
    """

    ends: Jagged


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SegmentValues(Batch):
    """Estimated value at segment boundaries.

    Attributes:
        values: Jagged float32 with (number of segments + 1) entries per row: the start, then each segment end.
        logs: Jagged float64, natural logs of the values [nats], −inf for 0, from estimators whose values may be too
            small for a float32; None from others.
        errors: Jagged float32, standard errors of the values, from estimators that know them; None from others.
    """

    values: Jagged
    logs: Jagged | None = None
    errors: Jagged | None = None

    def relative(self) -> Jagged:
        """Jagged float64: the values up to a positive factor per row; with `logs`, the largest of each row is 1 (or all
        are 0)."""
        if self.logs is None:
            return self.values.to(torch.float64)
        largest = torch.full((len(self),), -torch.inf, dtype=torch.float64)
        largest.scatter_reduce_(0, self.logs.row_ids, self.logs.values, "amax")
        # A row of zeros, whose logs are all −inf, stays one.
        largest = torch.where(torch.isinf(largest), 0.0, largest)
        return self.logs.with_values(torch.exp(self.logs.values - largest[self.logs.row_ids]))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Credit(Batch):
    """The credit of each token, as the objective reads it.

    Attributes:
        advantage: Jagged float32 over response tokens.
        mask: Jagged bool over response tokens, True where the token is trained on.
        columns: further Jagged columns over response tokens, for objectives that read them.
    """

    advantage: Jagged
    mask: Jagged
    columns: dict[str, Jagged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("advantage", "mask"):
            if not isinstance(getattr(self, name), Jagged):
                raise AlignmentError(
                    f"Credit.{name}: expected a Jagged with one value per response token, got a "
                    f"{type(getattr(self, name)).__name__}. One number per trajectory becomes one by "
                    "trajectories.response_tokens.spread(numbers)."
                )
        super().__post_init__()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TokenLogprobs(Batch):
    """Log-probs of sampled tokens under the learner; minus the engine's, they are the log-ratio of the two.

    Attributes:
        logprobs: Jagged float32 over response tokens [nats], at the batch's temperature; NaN where none was computed.
    """

    logprobs: Jagged


@dataclass(frozen=True, eq=False, kw_only=True)
class ReferenceLogprobs(TokenLogprobs):
    """Log-probs of sampled tokens under a reference model, as another trainer recorded them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainReport(Payload):
    """Report of one learner iteration. `metrics` are plain floats, `seconds` are per phase."""

    metrics: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Adapter(Payload):
    """Description of a LoRA adapter, in addition to its tensors: each adapted layer adds B·A · alpha / rank.

    Attributes:
        rank: rank of every layer's pair of matrices A [rank, in] and B [out, rank].
        alpha: numerator of the scale.
        targets: last parts of the adapted layers' names, such as "q_proj".
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ScoredSequence(Payload):
    """A fixed sequence and the log-probs that weights give it, by which an engine shows that it uses these weights.

    Attributes:
        tokens: ids, the first of which is only context.
        logprobs: log-prob of every token but the first at temperature 1 [nats].
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Weights(Payload):
    """Weights that a learner publishes and an engine loads: HF-named tensors, a stream or a folder of them, or none.

    With none, they are the weights with which the model was loaded.

    Attributes:
        version: number of learner iterations that led to these weights; 0 is the initial model.
        tensors: name → tensor (a snapshot the learner never changes), or None.
        stream: yields the same pairs from the learner's parameters, one tensor at a time, as often as it is called
            until the learner trains again; then it raises CreditgraphError. A tensor is valid until the learner trains.
        path: folder with safetensors in Hugging Face layout, or None.
        adapter: `tensors` are then those of a LoRA adapter on the model's own weights, under PEFT's names; or None.
        scored: log-probs of a fixed sequence, from the learner that holds the weights; None if no learner does.
    """

    version: int
    tensors: dict[str, Tensor] | None = None
    stream: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    path: str | None = None
    adapter: Adapter | None = None
    scored: ScoredSequence | None = None

    @property
    def initial(self) -> bool:
        """Whether they are the weights with which the model was loaded."""
        return self.tensors is None and self.stream is None and self.path is None

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, of a stream one at a time; nothing of a folder."""
        return iter((self.tensors or {}).items()) if self.stream is None else self.stream()

    def storable(self) -> Weights:
        """The same with a snapshot in place of the stream."""
        if self.stream is None:
            return self
        return replace(self, tensors={name: tensor.clone() for name, tensor in self.stream()}, stream=None)


def check_aligned(left: Batch, right: Batch) -> None:
    """Raises AlignmentError, naming both origins, unless both batches have the same uids in the same order."""
    if torch.equal(left.uid, right.uid):
        return
    a, b = (x.origin or type(x).__name__ for x in (left, right))
    only_a = set(left.uid.tolist()) - set(right.uid.tolist())
    only_b = set(right.uid.tolist()) - set(left.uid.tolist())
    what = (
        "the same rows in another order"
        if not only_a and not only_b
        else f"{len(only_a)} rows only in {a}, {len(only_b)} only in {b}"
    )
    raise AlignmentError(
        f"{a} ({len(left)} rows) and {b} ({len(right)} rows) describe different populations: {what}; "
        "expected the same uids in the same order. Wire both inputs from the same population."
    )
