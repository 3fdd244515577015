"""The contract of a component, and the context that its `setup` receives.

    @dataclass(frozen=True, kw_only=True)
    class Outputs:
        credit: Annotated[Credit, same_rows("trajectories")]

    class MyAdvantage(Component):
        '''One line on what it does. Formula, assumption, failure mode.'''

        paper = "2402.03300"

        @dataclass(frozen=True, kw_only=True)
        class Config:
            eps: float = 1e-6
            '''added to the standard deviation'''

        config: Config

        def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs:
        ...

Input sockets are the keyword-only parameters of `run`: `T` is required, `T | None = None` optional, `list[T]` accepts
several wires. Output sockets are the fields of the returned dataclass. `same_rows("x")` says that a batch has the rows
of input `x`; the graph checker follows it through the graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.ranks import DeviceSlots, Ranks, use_device
from creditgraph.pipeline.core.streams import Stream
from creditgraph.pipeline.core.trace import NO_TRACE, Trace

Placement = Literal["replica", "collective"]

# A uid is, from the top: sign 0, 24 bits of iteration, 7 of node, 10 of replica, 22 of counter.
COUNTER_BITS = 22  # of a uid; 10 bits of replica are above them
MAX_REPLICAS = 1 << 10


@dataclass(frozen=True)
class same_rows:
    """Annotation: this batch has exactly the rows, in order, of the named input.

    On an output it may also name another output of the same node, when no input has that name.
    """

    input: str


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The model under training, shared by engine, learner and tokenizer.

    Attributes:
        path: folder in Hugging Face layout, or a hub name; "tiny" is the embedded model.
        dtype: parameter dtype, "float32" or "bfloat16".
        max_context: tokens in prompt plus response; 0: what the nodes of the graph may need, or without a graph the
            model's own limit, which is the most in any case.
        trust_remote_code: passed to transformers.
        chat_template_kwargs: keyword arguments of the tokenizer's chat template in every prompt, such as
            {enable_thinking: false}.
        longest_row: computed, no setting: the most tokens of a row that the graph's nodes may need; 0: not known.
    """

    path: str = "tiny"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_context: int = 0
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    longest_row: int = field(default=0, init=False)

    def with_rows(self, tokens: int) -> ModelSpec:
        """The same model for a graph whose longest row has `tokens`."""
        spec = copy.copy(self)
        object.__setattr__(spec, "longest_row", tokens)
        return spec

    def __post_init__(self) -> None:
        if self.max_context < 0:
            raise ValueError(f"max_context {self.max_context}: expected tokens ≥ 1, or 0 for the model's own limit.")
        if not self.path:
            raise ValueError("path: expected a folder, a hub name 'owner/name' or 'tiny', got ''.")


class Count(float):
    """A logged amount (tokens, rows, requests), which is summed over replicas: `context.log(rows=Count(len(x)))`."""


def identity_sum(x: Tensor) -> Tensor:
    """The reducer of a run with one replica."""
    return x


def identity_exchange(parts: list[Any]) -> list[Any]:
    """The exchange of a run with one replica."""
    return parts


@dataclass(kw_only=True)
class Context:
    """The context of a node, passed to `setup`. The executor sets `iteration` before each `run`.

    Attributes:
        node: name in the graph; part of the key of every random stream.
        node_index: position in the sorted graph, below 128; part of every uid.
        seed: the run's random seed.
        iteration: the iteration being run, from 0.
        iterations: planned number of iterations (for schedules).
        device: device of models and their tensors.
        model: the model section of the configuration.
        data: source name ("train", "eval") → the data section for it, a plain dict the prompts component reads.
        run_dir: run directory, or None outside a run.
        ranks: this process among all of the run; one rank by default.
        all_sum: sums a tensor over the ranks with the same position in every replica (for `replica` nodes: over the
            leaders), each of which must call it; returns a new tensor, the same bits everywhere. The identity for one
            replica.
        exchange: sends the first of a list of values to replica 0, the second to replica 1, …; returns what every
            replica sent to this one, in their order. Same callers as `all_sum`; values are what a checkpoint can hold.
        metrics: numbers logged by the node, which the executor collects after each run; use `log`.
        counts: names of the metrics that are summed over replicas.
        lockstep: whether every other node reads this node's outputs before it runs again, so that they may be alive.
        slots: which of learner and engines has the memory of this process's devices.
        trace: the run's timeline; `with context.trace.span("prefill", "generation"):` shows a part of `run` in it.
    """

    node: str = "node"
    node_index: int = 0
    seed: int = 0
    iteration: int = 0
    iterations: int = 1
    device: str = "cpu"
    model: ModelSpec = field(default_factory=ModelSpec)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    run_dir: Path | None = None
    ranks: Ranks = field(default_factory=Ranks)
    all_sum: Callable[[Tensor], Tensor] = identity_sum
    exchange: Callable[[list[Any]], list[Any]] = identity_exchange
    metrics: dict[str, float] = field(default_factory=dict)
    counts: set[str] = field(default_factory=set)
    lockstep: bool = False
    slots: DeviceSlots = field(default_factory=DeviceSlots, repr=False, compare=False)
    trace: Trace = field(default=NO_TRACE, repr=False, compare=False)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    _counter: tuple[int, int] = (-1, 0)

    def rng(self) -> Stream:
        """The random stream of (seed, node, iteration)."""
        return Stream(self.seed, self.node, self.iteration)

    def uids(self, count: int) -> Tensor:
        """int64 [count] ids, unique in the run: from the top 24 bits iteration, 7 node, 10 replica, 22 counter."""
        return self.common_uids(count) + (self.ranks.replica << COUNTER_BITS)

    def common_uids(self, count: int) -> Tensor:
        """int64 [count] ids like those of `uids`, but the same on every replica.

        For rows of which each replica keeps its share.
        """
        # The counter restarts in every iteration, so a resumed run assigns the same uids.
        start = self._counter[1] if self._counter[0] == self.iteration else 0
        if start + count > 1 << COUNTER_BITS:
            raise RunError(
                f"node '{self.node}': {start + count} rows in iteration {self.iteration} of one replica; expected at "
                "most "
                f"{1 << COUNTER_BITS}, the ids there are. Lower the batch or the group size, or use more replicas."
            )
        self._counter = (self.iteration, start + count)
        # 39 = 22 counter + 10 replica + 7 node; 32 = 22 counter + 10 replica.
        base = (self.iteration << 39) | (self.node_index << 32)
        return torch.arange(base + start, base + start + count, dtype=torch.int64)

    def log(self, **metrics: float) -> None:
        """Records numbers for this iteration; they appear as "node/name" in metrics.jsonl.

        Of several replicas, a `Count` is summed, any other number averaged.
        """
        self.metrics.update({k: float(v) for k, v in metrics.items()})
        self.counts.update(k for k, v in metrics.items() if isinstance(v, Count))

    def reject(self, row: Any, reason: str) -> None:
        """Writes a skipped row to rejected.jsonl with its reason; the executor counts it."""
        self.rejected.append({"node": self.node, "iteration": self.iteration, "row": row, "reason": reason})


class ShardWrites(Protocol):
    """This rank's part of a state that is still being written."""

    def done(self) -> bool:
        """Whether this rank's part is written; communicates with no other rank."""

    def finish(self) -> None:
        """Waits for it and completes the files; all ranks call it. Raises RunError when one could not write."""


class Preflight:
    """What the class of a node answers before anything loads; most need none of it."""

    metrics: ClassVar[tuple[Metric, ...]] = ()

    @classmethod
    def shares_devices(cls, config: Any, device: str, world: int) -> bool:
        """Whether a node with these settings uses the learner's GPUs, and gives their memory back while it learns.

        Args:
            config: its settings.
            device: device of the run, as `Context.device`.
            world: number of ranks.
        """
        return False

    @classmethod
    def files(cls, config: Any, world: int) -> int:
        """Files and sockets that a node with these settings opens at most on one of `world` ranks, beside a few."""
        return 0

    @classmethod
    def alone(cls, config: Any) -> Any:
        """The settings with which one process holds the whole model, for tools that read a run of several."""
        return config

    @classmethod
    def metrics_of(cls, config: Any) -> tuple[Metric, ...]:
        """The metrics of a node with these settings: `metrics`, unless a part chosen in the settings logs more."""
        return cls.metrics

    @classmethod
    def references_of(cls, config: Any) -> frozenset[str] | None:
        """Kinds of reference answers that a node with these settings can read: value, choice, boolean or code.

        None: any, or none at all. A data section with another kind is refused when the configuration is checked.
        """
        return None

    @classmethod
    def needs_of(cls, config: Any) -> frozenset[str]:
        """What a node with these settings cannot do without.

        "thoughts", "logprobs" or "entropies" of responses, "states" of an environment.
        """
        return frozenset()

    @classmethod
    def lacks(cls, node: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """Sentences on what a start needs and is not there, as far as it is cheap to see: settings, files, packages.

        Only `train` asks, as the files of an old run may be gone when it is read. Arguments as those of `misfits`.
        """
        return []

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """Earlier responses that a row of this node, which has the policy sample or score it, holds beside its own."""
        return 0

    @classmethod
    def costs(cls, node: Any, graph: Any) -> list[str]:
        """Sentences on what an iteration of this node costs the policy's engine, for `train --check`.

        Args:
            node, graph: as those of `misfits`.
        """
        return []

    @classmethod
    def misfits(cls, node: Any, graph: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """Sentences on what in a configuration does not fit this node; nothing is loaded to find them.

        Args:
            node: the checked node (`creditgraph.pipeline.core.sockets.Node`).
            graph: the checked graph that it is in.
            model, data: the sections of these names.
        """
        return []

    @classmethod
    def environment(cls, config: Any) -> dict[str, str]:
        """Variables that libraries read when CUDA starts; `train` sets those that are not set before anything loads."""
        return {}


class Collective:
    """What a node on all ranks may have beside other nodes."""

    @classmethod
    def ranks_per_replica(cls, config: Any) -> int:
        """Number of processes that hold one replica of a collective node's model; known before anything loads."""
        return 1

    def save_shards(self, folder: Path) -> ShardWrites | None:
        """Writes this rank's part of a state that is too large for one process; called on all ranks.

        Returns None when all of it is written, or what is still being written, of the state as it is now.

        The folder belongs to a checkpoint that is still being written under a temporary name, and is the same for all
        ranks. Rank 0 also saves the result of `state_dict`, which is called on all ranks first.
        """

    def load_shards(self, folder: Path) -> None:
        """Reads what `save_shards` wrote, perhaps on another number of ranks; called on all ranks.

        Follows `load_state_dict`.
        """


class Component(Preflight, Collective):
    """Base of all nodes. Subclasses define `Config` and `run`, and override the other methods as needed.

    Class attributes:
        paper: arXiv id or name of the source, "" when there is none.
        placement: "replica" nodes run on the first rank of each data-parallel replica, on its share of the prompts.
            "collective" nodes run on all ranks, each with the values of its replica; they see other replicas' rows
            through `context.all_sum` and `context.exchange`. Payloads that are no batches they return the same
            everywhere. When wires allow it, they overlap with the generation of later iterations.
        same_settings: input → names of settings that must have the values of the node which the input is wired from,
            where that node has settings of these names; a graph in which they differ is refused.
        metrics: definitions of the numbers that the component logs; `creditgraph components NAME` lists them.
        final_pass: whether the node runs once more after the last iteration, on the final weights, with
            `context.iteration == context.iterations`.
        remakes: outputs whose latest value `initial()` makes again, bit for bit, once the state of a checkpoint is
            loaded. Checkpoints do not hold it, only older values that `@2` wires and later ones still read.
    """

    paper: ClassVar[str] = ""
    placement: ClassVar[Placement] = "replica"
    final_pass: ClassVar[bool] = False
    same_settings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    remakes: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """No settings."""

    config: Any
    run: Callable[..., Any]  # every subclass defines it; its signature declares the sockets

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config
        self.context = Context()

    def setup(self, context: Context) -> None:
        """Loads models and files. Overriders call `super().setup(context)` first."""
        self.context = context

    def initial(self) -> dict[str, Any]:
        """Output name → value before the first iteration, for outputs that `@k` wires may read.

        Called after setup, and after a checkpoint is loaded for the outputs that the component `remakes`.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that must survive a restart: a nested dict of tensors, numbers, strings, lists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; called after `setup`."""

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """Says why each row of the credit among `outputs` got its credit, as a formula with its numbers.

        A report calls it with what a run has recorded, on a component that was not set up; only `context.iteration` is
        set. Handles and weights are never recorded, so a component that reads them gets None for them. [] says nothing.

        Args:
            outputs: output name → what `run` returned.
            inputs: what it received, by socket.

        Returns:
            one text per row of the credit; its lines are separated by line breaks.
        """
        return []

    @classmethod
    def state_for(cls, states: Sequence[dict[str, Any]], replica: int, replicas: int) -> dict[str, Any]:
        """Replica nodes: returns the state that `load_state_dict` receives in replica `replica` of `replicas`.

        Args:
            states: states of the replicas that wrote the checkpoint, in order; a single one if all were equal.
        """
        return states[replica if replica < len(states) else 0]

    def close(self) -> None:
        """Releases processes, files and memory."""


AnyComponent = TypeVar("AnyComponent", bound=Component)


def set_up(component: AnyComponent, context: Context) -> AnyComponent:
    """Sets up a component that no run owns, and returns it; it is closed when that fails, and by the caller later."""
    use_device(context.device)
    try:
        component.setup(context)
    except BaseException:
        component.close()
        raise
    return component
