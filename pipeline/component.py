"""The contract of a component, and the context it is given.

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

        def run(self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]) -> Outputs: ...

Input sockets are the keyword-only parameters of `run`: `T` is required, `T | None = None` optional, `list[T]` takes several
wires. Output sockets are the fields of the returned dataclass. `same_rows("x")` says that a batch has the rows of input `x`;
the graph checker follows it through the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pipeline.streams import Stream

Placement = Literal["replica", "collective"]


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
        max_context: tokens in prompt plus response; 0 takes the model's own limit.
        trust_remote_code: passed to transformers.
    """

    path: str = "tiny"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_context: int = 0
    trust_remote_code: bool = False


def identity_sum(x: Tensor) -> Tensor:
    """The reducer of a run with one replica."""
    return x


@dataclass(kw_only=True)
class Context:
    """What a node is given in `setup`. The executor sets `iteration` before each `run`.

    Attributes:
        node: name in the graph; part of the key of every random stream.
        node_index: position in the sorted graph, below 128; part of every uid.
        seed: of the run.
        iteration: the iteration being run, from 0.
        iterations: planned number of iterations (for schedules).
        device: where models live.
        model: the model section of the configuration.
        data: source name ("train", "eval") → the data section for it, a plain dict the prompts component reads.
        run_dir: run directory, or None outside a run.
        all_sum: sums a tensor over all data-parallel replicas; the identity for one.
        metrics: sink the executor empties after each run of the node; use `log`.
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
    all_sum: Callable[[Tensor], Tensor] = identity_sum
    metrics: dict[str, float] = field(default_factory=dict)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    _counter: tuple[int, int] = (-1, 0)

    def rng(self) -> Stream:
        """The random stream of (seed, node, iteration)."""
        return Stream(self.seed, self.node, self.iteration)

    def uids(self, count: int) -> Tensor:
        """int64 [count] ids, unique in the run: 24 bits iteration, 7 bits node, 32 bits counter."""
        start = self._counter[1] if self._counter[0] == self.iteration else 0
        self._counter = (self.iteration, start + count)
        base = (self.iteration << 39) | (self.node_index << 32)
        return torch.arange(base + start, base + start + count, dtype=torch.int64)

    def log(self, **metrics: float) -> None:
        """Records numbers for this iteration; they appear as "node/name" in metrics.jsonl."""
        self.metrics.update({k: float(v) for k, v in metrics.items()})

    def reject(self, row: Any, reason: str) -> None:
        """Writes a skipped row to rejected.jsonl with its reason; the executor counts it."""
        self.rejected.append({"node": self.node, "iteration": self.iteration, "row": row, "reason": reason})


class Component:
    """Base of all nodes. Subclasses define `Config`, `run`, and what else they need.

    Class attributes:
        paper: arXiv id or name of the source, "" when there is none.
        placement: "replica" nodes run once per data-parallel replica on its share; "collective" nodes run on all ranks
            and, when wires allow it, beside the generation of later iterations.
        final_pass: run once more after the last iteration, on the final weights, with `context.iteration == context.iterations`.
    """

    paper: ClassVar[str] = ""
    placement: ClassVar[Placement] = "replica"
    final_pass: ClassVar[bool] = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """No settings."""

    config: Any

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config
        self.context = Context()

    def setup(self, context: Context) -> None:
        """Loads models and files. Overriders call `super().setup(context)` first."""
        self.context = context

    def initial(self) -> dict[str, Any]:
        """Output name → value before the first iteration, for outputs that may be read with `@k`. Called after setup."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart: a nested dict of tensors, numbers, strings, lists."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; called after `setup`."""

    def close(self) -> None:
        """Releases processes, files and memory."""
