"""Iterations of a run as discrete events: engine servers, learner ranks, and the wire between them that says who waits for whom.

A model for sizing engines against learners before anything is allocated. It keeps the rules of the executor: nodes of
the generation lane run one after the other, the rows of a generating node go to the servers at once, the learner waits
for all replicas, and the engine of iteration i reads `learner.weights@k` of iteration i − k. With k = 1 the lanes take
turns; from k = 2 on they overlap, and generation is at most k + 1 iterations ahead of the last finished one. Every draw
is keyed, so a plan has one result.
"""

from __future__ import annotations

import heapq
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import simpy
import torch
from numpy.typing import NDArray

from pipeline.core.errors import ConfigError
from pipeline.core.streams import Stream

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Draws:
    """A distribution given by values that are equally likely.

    >>> Draws((1.0, 3.0)).at(np.array([0.2, 0.7])).tolist()
    [1.0, 3.0]
    """

    values: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 0 or not np.isfinite(self.values).all():
            raise ConfigError(
                f"simulate: a distribution of {list(self.values)[:5]}; wanted one or more numbers of at least 0."
            )

    @staticmethod
    def lognormal(median: float, sigma: float, most: float, points: int = 512) -> Draws:
        """Quantiles of a lognormal distribution cut at `most`; sigma 0.5 to 1 is usual for lengths of reasoning."""
        normal = statistics.NormalDist()
        return Draws(
            tuple(min(most, median * float(np.exp(sigma * normal.inv_cdf((i + 0.5) / points)))) for i in range(points))
        )

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return statistics.fmean(self.values)

    def at(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values at uniform numbers [N] in [0, 1)."""
        ordered = np.sort(np.array(self.values))
        return ordered[(uniform * len(ordered)).astype(np.int64)]

    def scaled(self, factor: float) -> Draws:
        """All values times a factor."""
        return Draws(tuple(v * factor for v in self.values))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Speed of a server that decodes several sequences at once.

    Attributes:
        floor: seconds of a step, one token for each sequence, whatever their number: reading the weights.
        each: seconds that every running sequence adds to a step.
        slots: sequences that run at once; further ones wait.
    """

    floor: float
    each: float
    slots: int = 256

    def step(self, running: int) -> float:
        """Seconds of a step with `running` sequences."""
        return self.floor + self.each * running

    @property
    def peak(self) -> float:
        """Tokens per second with all slots taken."""
        return self.slots / self.step(self.slots)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One node of the generation lane.

    Attributes:
        name: of the node.
        rows: rows of an iteration, all replicas together.
        tokens: tokens that a row takes from a server; None for nodes that ask no server.
        row_seconds: further seconds per row, of `workers` of each replica that share the rows.
        seconds: further seconds per iteration and replica.
    """

    name: str
    rows: int
    tokens: Draws | None = None
    row_seconds: float = 0.0
    workers: int = 1
    seconds: Draws = field(default_factory=Draws)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run on paper.

    Attributes:
        stages: the generation lane, in order.
        curve: of one server.
        servers: in all. With `own_servers` each replica asks only its part of them (engines in the process), else all
            ask all.
        replicas: data-parallel replicas of the learner.
        update: seconds in which the servers take new weights and generate nothing, at the beginning of an iteration.
        learn: seconds of the learner on one iteration's batch.
        other: seconds of the learning lane besides: records, metrics, checkpoints.
        delay: k of `learner.weights@k`.
        engine_gpus, learner_gpus: for utilisation; the same GPUs when `shared` (colocated), which never overlaps.
    """

    stages: tuple[Stage, ...]
    curve: Curve
    servers: int = 1
    own_servers: bool = False
    replicas: int = 1
    update: Draws = field(default_factory=Draws)
    learn: Draws = field(default_factory=Draws)
    other: Draws = field(default_factory=Draws)
    delay: int = 1
    engine_gpus: int = 1
    learner_gpus: int = 1
    shared: bool = False

    def __post_init__(self) -> None:
        if self.servers < 1 or self.replicas < 1 or self.delay < 1 or self.curve.slots < 1:
            raise ConfigError(
                f"simulate: {self.servers} servers with {self.curve.slots} slots, {self.replicas} replicas, "
                f"weights@{self.delay}; wanted "
                "at least one of each."
            )
        if self.own_servers and self.servers % self.replicas:
            raise ConfigError(
                f"simulate: {self.servers} servers of {self.replicas} replicas; wanted a multiple, as each replica has "
                "its own."
            )

    @property
    def overlaps(self) -> bool:
        """Whether generation runs beside learning."""
        return self.delay >= 2 and not self.shared


@dataclass(frozen=True)
class Simulated:
    """What came out; all but `tokens` and `rows` over the iterations in which the pipeline is full.

    Attributes:
        seconds: from end to end of each iteration.
        tokens, rows: served, per iteration, from the first.
        engine_busy: share of time in which a server runs anything, mean over servers.
        engine_full: tokens made, over those that servers make with all slots taken all the time.
        learner_busy: share of time in which the learner computes.
        plan: what was simulated.
    """

    seconds: list[float]
    tokens: list[int]
    rows: list[int]
    engine_busy: float
    engine_full: float
    learner_busy: float
    plan: Plan

    @property
    def iteration(self) -> float:
        """Mean seconds of an iteration."""
        return statistics.fmean(self.seconds)

    @property
    def median(self) -> float:
        """Median seconds of an iteration."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of wall time."""
        return statistics.fmean(self.tokens) / self.iteration

    @property
    def bubble(self) -> float:
        """Share of GPU time in which a GPU does nothing."""
        plan = self.plan
        if plan.shared:
            return 1 - self.engine_busy - self.learner_busy
        used = plan.engine_gpus * self.engine_busy + plan.learner_gpus * self.learner_busy
        return 1 - used / (plan.engine_gpus + plan.learner_gpus)


def simulate(plan: Plan, iterations: int = 12, seed: int = 0) -> Simulated:
    """Runs `iterations` iterations of a plan. The first k + 1, in which the pipeline fills, are left out of the figures.

    Raises:
        ConfigError: too few iterations.
    """
    skipped = plan.delay + 1
    if iterations <= skipped:
        raise ConfigError(
            f"simulate: {iterations} iterations with weights@{plan.delay}; wanted more than {skipped}, the pipeline's "
            "filling."
        )
    run = _Run(plan, iterations + skipped, seed)  # in the last ones generation has ended: the pipeline empties
    run.env.run()
    marks = run.marks[: iterations + 1]
    span = marks[-1].time - marks[skipped].time
    servers = span * plan.servers
    busy = (marks[-1].busy - marks[skipped].busy) / servers if span else 0.0
    made = (marks[-1].work - marks[skipped].work) / servers if span else 0.0
    return Simulated(
        seconds=[b.time - a.time for a, b in zip(marks[skipped:], marks[skipped + 1 :], strict=False)],
        tokens=run.tokens[:iterations],
        rows=run.rows[:iterations],
        engine_busy=busy,
        engine_full=made / plan.curve.peak,
        learner_busy=(marks[-1].learned - marks[skipped].learned) / span if span else 0.0,
        plan=plan,
    )


class Server:
    """Decodes its running sequences at one speed, which falls with their number; serves waiting ones first come, first served.

    Time is kept in tokens per running sequence: a sequence of n tokens admitted at v ends at v + n, whatever comes and
    goes meanwhile.
    """

    def __init__(self, env: simpy.Environment, curve: Curve) -> None:
        self._env, self._curve = env, curve
        self._running: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._made, self._since = 0.0, 0.0
        self._timer = self._count = 0
        self.busy = self.work = 0.0

    def submit(self, rows: Sequence[tuple[float, Callable[[], None]]]) -> None:
        """Takes rows, (tokens, what to call at the end)."""
        self.settle()
        self._waiting.extend(rows)
        self._next()

    def settle(self, made: float | None = None) -> None:
        """Brings the counters up to now."""
        passed, running = self._env.now - self._since, len(self._running)
        self._since = self._env.now
        if running:
            before = self._made
            self._made = self._made + passed / self._curve.step(running) if made is None else made
            self.busy += passed
            self.work += (self._made - before) * running

    def _next(self) -> None:
        """Ends and admits sequences, then sets the timer for the next end."""
        while True:
            while self._running and self._running[0][0] <= self._made:
                heapq.heappop(self._running)[2]()
            if not self._waiting or len(self._running) >= self._curve.slots:
                break
            tokens, ended = self._waiting.popleft()
            self._count += 1
            heapq.heappush(self._running, (self._made + tokens, self._count, ended))
        if not self._running:
            self._made = 0.0  # keeps the sums small, and so exact
            return
        self._timer += 1
        number, end = self._timer, self._running[0][0]

        def ring(event: simpy.Event) -> None:
            if number == self._timer:
                self.settle(end)
                self._next()

        timeout = self._env.timeout((end - self._made) * self._curve.step(len(self._running)))
        timeout.callbacks.append(ring)


@dataclass(frozen=True)
class _Mark:
    time: float
    busy: float = 0.0
    work: float = 0.0
    learned: float = 0.0


class _Run:
    def __init__(self, plan: Plan, iterations: int, seed: int) -> None:
        self.env = simpy.Environment()
        self.plan, self.iterations, self.seed = plan, iterations, seed
        self.servers = [Server(self.env, plan.curve) for _ in range(plan.servers)]
        self._outstanding = np.zeros(plan.servers, np.int64)  # rows that run or wait
        self.marks = [_Mark(0.0)]
        self.tokens, self.rows = [0] * iterations, [0] * iterations
        self.learned = 0.0
        self._generated = [[self.env.event() for _ in range(plan.replicas)] for _ in range(iterations)]
        self._weights = [self.env.event() for _ in range(iterations)]
        self._finished = [self.env.event() for _ in range(iterations)]
        self._shares: dict[tuple[str, int], NDArray[np.float64]] = {}
        for replica in range(plan.replicas):
            self.env.process(self._generation(replica))
        self.env.process(self._learning())

    def _draw(self, draws: Draws, name: str, iteration: int, rows: int = 1) -> NDArray[np.float64]:
        if len(set(draws.values)) == 1:
            return np.full(rows, draws.values[0])
        return draws.at(Stream(self.seed, f"simulate {name}", iteration).uniform(torch.arange(rows)).numpy())

    def _generation(self, replica: int) -> Process:
        plan = self.plan
        lead = plan.delay + 1 if plan.overlaps else 1
        for iteration in range(self.iterations):
            if iteration >= lead:
                yield self._finished[iteration - lead]
            if iteration >= plan.delay:
                yield self._weights[iteration - plan.delay]
            if not plan.own_servers and iteration:
                yield self.env.all_of(
                    self._generated[iteration - 1]
                )  # servers change their weights when no replica samples any more
            yield self.env.timeout(float(self._draw(plan.update, "update", iteration)[0]))
            for stage in plan.stages:
                yield from self._stage(stage, iteration, replica)
            self._generated[iteration][replica].succeed()

    def _stage(self, stage: Stage, iteration: int, replica: int) -> Process:
        size, more = divmod(stage.rows, self.plan.replicas)
        start = replica * size + min(replica, more)
        rows = size + (replica < more)
        if stage.tokens is not None and rows:
            yield self._ask(self._lengths(stage, iteration)[start : start + rows], iteration, replica)
        seconds = float(self._draw(stage.seconds, f"{stage.name} {replica}", iteration)[0])
        yield self.env.timeout(seconds + -(-rows // stage.workers) * stage.row_seconds)

    def _lengths(self, stage: Stage, iteration: int) -> NDArray[np.float64]:
        """Of all replicas, so that their number changes no row."""
        key = (stage.name, iteration)
        if key not in self._shares and stage.tokens is not None:
            self._shares[key] = self._draw(stage.tokens, stage.name, iteration, stage.rows)
        return self._shares[key]

    def _ask(self, lengths: NDArray[np.float64], iteration: int, replica: int) -> simpy.Event:
        done = self.env.event()
        left = len(lengths)

        def ended(server: int) -> None:
            nonlocal left
            left -= 1
            self._outstanding[server] -= 1
            self.rows[iteration] += 1
            if not left:
                done.succeed()

        self.tokens[iteration] += round(float(lengths.sum()))
        part = len(self.servers) // self.plan.replicas
        first, last = (replica * part, (replica + 1) * part) if self.plan.own_servers else (0, len(self.servers))
        parts: defaultdict[int, list[tuple[float, Callable[[], None]]]] = defaultdict(list)
        for length in lengths.tolist():
            least = first + int(self._outstanding[first:last].argmin())
            self._outstanding[least] += 1
            parts[least].append((length, partial(ended, least)))
        for server in sorted(parts):
            self.servers[server].submit(parts[server])
        return done

    def _learning(self) -> Process:
        for iteration in range(self.iterations):
            yield self.env.all_of(self._generated[iteration])
            seconds = float(self._draw(self.plan.learn, "learn", iteration)[0])
            yield self.env.timeout(seconds)
            self.learned += seconds
            self._weights[iteration].succeed()
            yield self.env.timeout(float(self._draw(self.plan.other, "other", iteration)[0]))
            for server in self.servers:
                server.settle()
            totals = (sum(s.busy for s in self.servers), sum(s.work for s in self.servers), self.learned)
            self.marks.append(_Mark(self.env.now, *totals))
            self._finished[iteration].succeed()
