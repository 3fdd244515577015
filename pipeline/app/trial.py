"""Runs a component twice on a small batch of an embedded recipe and compares; part of `creditgraph check`."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
import traceback
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.handles import Policy, Requests, Sampling, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import (
    Batch,
    Credit,
    Payload,
    Rewards,
    Segments,
    TrainReport,
    Trajectories,
    Weights,
)
from creditgraph.pipeline.core.settings import build_config, type_text
from creditgraph.pipeline.core.sockets import Node, Socket, Wire, sockets_of
from creditgraph.pipeline.core.wiring import check_wiring
from creditgraph.pipeline.run.compose.experiment import Experiment, build_experiment, compose
from creditgraph.pipeline.run.node_runner import NodeFailure
from creditgraph.pipeline.run.session import GraphSession

# The first that has every input wins; together they carry every payload.
RECIPES = (
    "toy_grpo",
    "toy_srpo",
    "toy_rredcot",
    "toy_ibpo",
    "toy_treerl",
    "toy_vineppo",
    "toy_critique_grpo",
    "toy_igpo_thoughts",
    "toy_srpo_thoughts",
)
SMALL = ("prompts.batch=2", "run.iterations=2", "evaluator.num_problems=4", "data.train.size=50", "data.eval.size=10")
MAX_WIRINGS = 200
NAME = "checked"
MAY_BE_NAN = ("logprobs", "entropies", "engine_logprobs")  # where an engine or a learner has computed none


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What two runs showed.

    Attributes:
        findings: sentences on what is wrong with the component, which begin after its name.
        note: on what it ran, or why it could not run.
    """

    findings: list[str]
    note: str


def try_component(cls: type[Component], use: str, settings: Mapping[str, Any]) -> Trial:
    """Runs a component twice, on the same inputs with the same seed, and checks what it returns.

    Args:
        cls: the class; it follows the contract as far as it can be read.
        use: its name.
        settings: its settings.
    """
    try:
        sockets = sockets_of(cls)  # type: ignore[arg-type]
    except ConfigError:
        return Trial(findings=[], note="not run: its sockets cannot be read")
    config, problems = build_config(cls.Config, settings, NAME)
    if problems:
        listed = " ".join(text.removeprefix(f"{NAME}.") for text in problems)
        return Trial(findings=[], note=f"not run: {listed} Give settings with -s setting=value.")
    place = _place(Node(NAME, use, cls, config, {}, dict(settings)))
    if place is None:
        inputs = ", ".join(f"{name} ({s.type_text})" for name, s in sockets.inputs.items() if s.required)
        return Trial(findings=[], note=f"not run: no embedded recipe has outputs for its inputs {inputs}")
    recipe, experiment = place
    with GraphSession(experiment) as session:
        return _two_runs(session, recipe)


def _place(node: Node) -> tuple[str, Experiment] | None:
    """The first embedded recipe with sound wires for every required input, and the node added to its graph."""
    for recipe in RECIPES:
        experiment = build_experiment(compose([f"recipe={recipe}", *SMALL]))
        nodes = {n.name: n for n in experiment.graph.nodes}
        for wires in itertools.islice(_wirings(node, experiment.graph), MAX_WIRINGS):
            wired = dataclasses.replace(node, wires=wires)
            problems = check_wiring({**nodes, NAME: wired}, {*nodes, NAME})
            if all(text.startswith(f"{NAME}.") and "trains nothing" in text for text in problems):
                graph = Graph((*experiment.graph.nodes, wired))
                return recipe, dataclasses.replace(experiment, graph=graph)
    return None


def _wirings(node: Node, graph: Graph) -> Iterator[dict[str, list[Wire]]]:
    """Every choice of one output per required input; those first that the graph's own nodes use for such an input."""
    sockets = {name: socket for name, socket in node.sockets.inputs.items() if socket.required}
    choices = [_candidates(name, socket, graph) for name, socket in sockets.items()]
    for chosen in itertools.product(*choices):
        yield {name: [wire] for name, wire in zip(sockets, chosen, strict=True)}


def _candidates(name: str, socket: Socket, graph: Graph) -> list[Wire]:
    fitting = [
        Wire(source.name, output, delay=1 if other.carries(Weights) else 0)
        for source in graph.nodes
        for output, other in source.sockets.outputs.items()
        if dataclasses.replace(socket, is_list=False).accepts(other)
    ]
    used = [wire for n in graph.nodes for wire in n.wires.get(name, [])]
    return sorted(fitting, key=lambda wire: (wire not in used, wire.output != name))


def _two_runs(session: GraphSession, recipe: str) -> Trial:
    node = session.graph[NAME]
    inputs = session.inputs(node, 0)
    rows = max((len(v) for v in _listed(inputs.values()) if isinstance(v, Batch)), default=0)
    where = f"on {rows} rows of recipe={recipe}" if rows else f"in recipe={recipe}"
    runs: list[dict[str, Any]] = []
    for number in range(2):
        # Draws from the keyed streams do not depend on these; draws from anywhere else differ between the two runs.
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002 - the component may use it
        try:
            runner = session.start(node)
        except CreditgraphError as error:
            return Trial(findings=[], note=f"not run: {_bare(str(error))}")
        except NodeFailure as error:
            return Trial(findings=[f".setup raises {_raised(error, node.cls)}."], note=f"set up {where}")
        try:
            runs.append(runner.run(0, inputs))
            runs[-1] = {name: _exercised(value, session) for name, value in runs[-1].items()}
        except (CreditgraphError, NodeFailure, Exception) as error:
            said = _bare(str(error)) if isinstance(error, CreditgraphError) else f"{_raised(error, node.cls)}."
            verb = "" if isinstance(error, CreditgraphError) else " raises"
            return Trial(findings=[f".run{verb or ':'} {said}"], note=f"run once {where}")
    findings = [text for name, value in runs[0].items() for text in _output(name, value, node, inputs)]
    if not findings:
        findings = [
            f".run: two runs with the same seed differ in '{place}'; draw from context.stream(…) only."
            for name in runs[0]
            for place in _different(name, runs[0][name], runs[1][name])
        ][:1]
    return Trial(findings=findings, note=f"run twice {where}")


def _listed(values: Any) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list) else [value]


def _bare(text: str) -> str:
    """The first line of an error of a node, without the node's place."""
    first = text.partition("\n")[0]
    while first.startswith(f"{NAME} ("):
        first = first.partition(": ")[2]
    return first


def _raised(error: BaseException, cls: type) -> str:
    """Such as "KeyError: 'x' (ideas.py, line 12)": the deepest line in the component's own file."""
    cause = error.__cause__ if isinstance(error, NodeFailure) and error.__cause__ else error
    own = inspect.getsourcefile(cls)
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == own]
    line = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})" if frames else ""
    first = (str(cause).splitlines() or [""])[0]
    return f"{type(cause).__name__}: {first}{line}"


def _exercised(value: Any, session: GraphSession) -> Any:
    """What a handle returns for a small batch; any other value as it is."""
    prompts = session.value(Wire("prompts", "batch"), 0)
    if isinstance(value, Verifier):
        return value.verify(prompts, session.value(Wire("sampler", "trajectories"), 0))
    if isinstance(value, Policy):
        seed = torch.arange(len(prompts))
        return value.generate(Requests(tokens=prompts.tokens, seed=seed, sampling=Sampling(max_tokens=8)))
    return value


def _output(name: str, value: Any, node: Node, inputs: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with an output: types of its columns, rows, tokens per row, numbers that are none."""
    place = f".run: output '{name}'"
    if not dataclasses.is_dataclass(value) or isinstance(value, TrainReport):
        return
    hints = get_type_hints(type(value))
    columns = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    wrong = [c for c, column in columns.items() if not _is_a(column, hints[c])]
    for column in wrong:
        got = type(columns[column]).__name__
        yield f"{place}: {type(value).__name__}.{column} is a {got}; expected {type_text(hints[column])}."
    if wrong or not isinstance(value, Batch):
        return
    socket = node.sockets.outputs.get(name)
    other = inputs.get(socket.same_rows) if socket and socket.same_rows else None
    others = other if isinstance(other, list) else [other] if isinstance(other, Batch) else []
    if others and not torch.equal(value.uid, torch.cat([batch.uid for batch in others])):
        expected = sum(map(len, others))
        yield (
            f"{place} has {len(value)} rows that are not the {expected} of '{socket.same_rows if socket else ''}'; "
            "expected their uids in their order."
        )
        return
    yield from _tokens(place, value, inputs)
    yield from _numbers(place, value)


def _is_a(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_is_a(value, member) for member in get_args(hint))
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(v, get_args(hint)[1]) for v in value.values())
    plain = origin or hint
    return not isinstance(plain, type) or isinstance(value, plain) or (plain is float and isinstance(value, int))


def _tokens(place: str, value: Batch, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Columns over response tokens need one value per token; segments end where the response does."""
    trajectories = next((v for v in inputs.values() if isinstance(v, Trajectories)), None)
    if trajectories is None or not torch.equal(trajectories.uid, value.uid):
        return
    tokens = trajectories.response_tokens
    if isinstance(value, Credit):
        for name, column in {"advantage": value.advantage, "mask": value.mask, **value.columns}.items():
            if not torch.equal(column.offsets, tokens.offsets):
                got, expected = len(column.values), len(tokens.values)
                yield f"{place}: {name} has {got} values in its rows; expected one per response token ({expected})."
        if value.mask.values.dtype != torch.bool:
            yield f"{place}: mask has {value.mask.values.dtype}; expected torch.bool."
    if (
        isinstance(value, Segments)
        and [int(r[-1]) if len(r) else 0 for r in value.ends.rows()] != tokens.lengths.tolist()
    ):
        yield f"{place}: the last end of a row is not the length of its response."


def _numbers(place: str, value: Batch) -> Iterator[str]:
    valid = value.valid if isinstance(value, Rewards) else None
    for name, column in _columns(value):
        numbers = column.values if isinstance(column, Jagged) else column
        if name in MAY_BE_NAN or not numbers.is_floating_point():
            continue
        counted = numbers[valid] if valid is not None and name == "value" else numbers
        bad = int((~counted.isfinite()).sum())
        if bad:
            yield f"{place}: {bad} of {len(counted)} values of {name} are not finite."


def _columns(value: Any) -> Iterator[tuple[str, Tensor | Jagged]]:
    for name, column in vars(value).items():
        items = column.items() if isinstance(column, dict) else [(name, column)]
        yield from ((n, c) for n, c in items if isinstance(c, Tensor | Jagged))


def _different(place: str, first: Any, second: Any) -> Iterator[str]:
    """The places where two outputs differ; times may."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same = first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())
        if not same:
            yield place
    elif isinstance(first, Jagged) and isinstance(second, Jagged):
        if any(True for _ in _different("", first.values, second.values)) or not first.offsets.equal(second.offsets):
            yield place
    elif isinstance(first, dict) and isinstance(second, dict):
        for key in first.keys() | second.keys():
            if "seconds" not in key and "per_second" not in key:
                yield from _different(f"{place}.{key}", first.get(key), second.get(key))
    elif dataclasses.is_dataclass(first) and type(first) is type(second):
        for f in dataclasses.fields(first):
            if f.name != "seconds":
                yield from _different(f"{place}.{f.name}", getattr(first, f.name), getattr(second, f.name))
    elif isinstance(first, Payload):
        return  # a handle of another kind
    elif first != second and not (first != first and second != second):
        yield place
