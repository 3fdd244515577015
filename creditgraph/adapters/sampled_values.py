"""Values of recorded rollouts, by continuations that any OpenAI-compatible server samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from creditgraph.adapters.endpoint import WHOLE
from creditgraph.components.http import Client, check_url
from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.rollouts.rewards import finite_rewards
from creditgraph.components.rollouts.segments import close_segments
from creditgraph.components.verifier.base import verifier_of
from creditgraph.pipeline.app.credit.sessions import learner_of, samples_rollouts
from creditgraph.pipeline.app.credit.side_by_side import mixed_first
from creditgraph.pipeline.app.credit.truth import SAMPLED_SEGMENTS, SAMPLED_VALUES
from creditgraph.pipeline.core.component import Component, Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.handles import Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Segments, SegmentValues, Trajectories, Turns
from creditgraph.pipeline.core.registry import build_component
from creditgraph.pipeline.core.streams import Stream, key_of
from creditgraph.pipeline.run.checkpoint import checksum
from creditgraph.pipeline.run.metrics import JsonLines
from creditgraph.pipeline.run.recording import recorded_iterations, write_payload
from creditgraph.pipeline.run.replay import Replay
from creditgraph.pipeline.run.run_directory import CHECKSUMS

# Names of --segmenter that need no settings; any other is a registered component.
SEGMENTERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "thought": ("segmenter.thought", {}),
    "newline": ("segmenter.thought", {"stop": "\n"}),
    "fixed": ("segmenter.fixed", {}),
}
State = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is sampled, and where.

    Attributes:
        url: of the server, with the version, such as "http://localhost:8000/v1".
        model: the name that the server gives the model.
        rollouts: continuations per boundary.
        rows: rollouts of the run that get values.
        iteration: a recorded one; None is the newest.
        segmenter: thought, newline, fixed, or a registered segmenter.
        settings: of the segmenter.
        verifier: a registered verifier, or path/to/file.py:function; "" is the run's.
        max_tokens: most tokens of a whole response; 0 is the longest one of the iteration.
        text: send prompts as text, for servers that take no token ids.
        concurrency: requests at a time.
        seconds: limit of a request.
        key: sent as a bearer token.
    """

    url: str
    model: str
    rollouts: int = 16
    rows: int = 8
    iteration: int | None = None
    segmenter: str = "thought"
    settings: Mapping[str, Any] = field(default_factory=dict)
    verifier: str = ""
    max_tokens: int = 0
    text: bool = False
    concurrency: int = 8
    seconds: float = 300.0
    key: str = ""

    def __post_init__(self) -> None:
        if self.rollouts < 2 or self.rows < 1 or self.concurrency < 1 or self.max_tokens < 0 or self.seconds <= 0:
            raise ConfigError(
                "values: expected rollouts ≥ 2 (for a standard error), rows and concurrency ≥ 1, max-tokens ≥ 0 and "
                "seconds > 0."
            )
        try:
            check_url(self.url)
        except ValueError as error:
            raise ConfigError(f"--endpoint: {error}") from None


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """What a server would be asked.

    Attributes:
        iteration: of the rollouts.
        rows: the chosen rollouts.
        prompts: their problems.
        segments: of the rows.
        rewards: of the rows.
        states: tokens of prompt and response before a boundary → (row, tokens of the response).
        limit: most tokens of a continuation, per state.
    """

    iteration: int
    rows: Trajectories
    prompts: Prompts
    segments: Segments
    rewards: Rewards
    states: Mapping[State, tuple[int, int]]
    limit: Mapping[State, int]

    def cost(self, rollouts: int) -> tuple[int, int, int]:
        """Requests, and at most how many sampled tokens and tokens of prompts."""
        sampled = rollouts * sum(self.limit.values())
        return len(self.states), sampled, sum(len(state) for state in self.states)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sampled:
    """Values of the rows of a plan.

    Attributes:
        values: with their standard errors; the last one of a row is its reward.
        tokens: sampled ones, as the server counts them, or −1 where it does not.
        invalid: continuations that could not be verified; they count as 0.
    """

    values: SegmentValues
    tokens: int
    invalid: int


class ValueSampler:
    """Reads a run and samples values of its rollouts; use as a context manager.

    Args:
        path: run directory with recorded prompts and trajectories.
        settings: what is sampled.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self.settings = settings
        self._parts: list[Component] = []
        self._replay = Replay(path)

    def __enter__(self) -> ValueSampler:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.close()
        self._replay.close()

    def plan(self) -> Plan:
        """The boundaries, without a request."""
        s, replay = self.settings, self._replay
        wire = learner_of(replay.graph).wires["trajectories"][0]
        recorded = recorded_iterations(replay.path, f"{wire.source}.{wire.output}")
        if not recorded or (s.iteration is not None and s.iteration not in recorded):
            raise RunError(f"{replay.path}: {wire} is not recorded in that iteration; recorded: {recorded or 'none'}.")
        iteration = recorded[-1] if s.iteration is None else s.iteration
        turns = [f"{turn.source}.{turn.output}" for turn in replay.graph.outputs_of(Turns)]
        if any(iteration in recorded_iterations(replay.path, name) for name in turns):
            raise ConfigError(
                f"{replay.path}: its rows are turns of episodes, and what follows a turn is up to its environment, "
                "which a server does not have; expected a run whose rows are whole responses. A graph with a critic of "
                "turns, such as turn_ppo, records the critic's values."
            )
        population: Trajectories = replay.value(wire, iteration)
        prompts: Prompts = self._first(Prompts, iteration)
        verdicts = self._first(Verifier, iteration).verify(prompts, population)
        rows = population.select(mixed_first(population, verdicts.correct, s.rows))
        segments = self._segments(rows)
        longest = s.max_tokens or int(population.response_tokens.lengths.max())
        states: dict[State, tuple[int, int]] = {}
        for i, (prompt, response, ends) in enumerate(
            zip(rows.prompt_tokens.to_lists(), rows.response_tokens.to_lists(), segments.ends.to_lists(), strict=True)
        ):
            for start in [0, *ends[:-1]] if ends else []:
                states.setdefault((*prompt, *response[:start]), (i, start))
        return Plan(
            iteration=iteration,
            rows=rows,
            prompts=prompts,
            segments=segments,
            rewards=finite_rewards(verdicts.select(verdicts.index_of(rows.uid))),
            states=states,
            limit={state: max(1, longest - start) for state, (_, start) in states.items()},
        )

    def sample(self, plan: Plan) -> Sampled:
        """Requests the continuations and verifies them; raises RunError where the server does not answer."""
        s = self.settings
        verifier = self._verifier(plan.iteration)
        stream = Stream(self._replay.experiment.run.seed, "values", plan.iteration)
        keys = torch.tensor([key_of(*state) >> 2 for state in plan.states], dtype=torch.int64)
        seeds = dict(zip(plan.states, (stream.seeds(keys) >> 32).tolist(), strict=True))
        headers = {"Authorization": f"Bearer {s.key}"} if s.key else {}
        # After a failure or Ctrl-C the client closes first, and ends the requests that the pool would wait for.
        with (
            ThreadPoolExecutor(s.concurrency) as pool,
            closing(Client(f"requests to {s.url}", headers, s.concurrency)) as client,
        ):
            replies = dict(zip(plan.states, pool.map(self._asker(client, plan, seeds), plan.states), strict=True))
        texts = {state: reply[0] for state, reply in replies.items()}
        outcome, invalid = self._outcomes(verifier, plan, texts)
        counted = [reply[1] for reply in replies.values()]
        tokens = sum(counted) if all(count >= 0 for count in counted) else -1
        return Sampled(values=_values(plan, outcome), tokens=tokens, invalid=invalid)

    def record(self, plan: Plan, sampled: Sampled) -> None:
        """Adds segments and values to the run's records, where `report` and `credit` find them."""
        folder = self._replay.path / "record"
        named = ((SAMPLED_SEGMENTS, plan.segments), (SAMPLED_VALUES, sampled.values))
        with closing(JsonLines(folder / CHECKSUMS, last_iteration=1 << 24)) as sums:
            for name, payload in named:
                file = folder / name / f"{plan.iteration:06d}.parquet"
                file.parent.mkdir(exist_ok=True)
                write_payload(file, payload)
                line = {"iteration": plan.iteration, "file": f"{name}/{file.name}", "sha256": checksum(file)}
                sums.write([line])

    def _first(self, kind: type, iteration: int) -> Any:
        wires = self._replay.graph.outputs_of(kind)
        if not wires:
            raise RunError(f"{self._replay.path}: its graph has no {kind.__name__}; expected a run with one.")
        return self._replay.value(wires[0], iteration)

    def _segments(self, rows: Trajectories) -> Segments:
        use, settings = SEGMENTERS.get(self.settings.segmenter, (self.settings.segmenter, {}))
        component = self._part(use, {**settings, **self.settings.settings}, "--segmenter")
        if self.settings.segmenter == "newline":  # recorded ends of thoughts are not those of lines
            rows = rows.replace(thought_ends=Jagged.from_rows([[]] * len(rows), torch.int32))
        segments: Segments = component.run(trajectories=rows).segments
        return segments.replace(ends=close_segments(segments.ends, rows.response_tokens.lengths))

    def _verifier(self, iteration: int) -> Verifier:
        name = self.settings.verifier
        if name:
            use, settings = ("verifier.function", {"function": name}) if ":" in name else (name, {})
            return verifier_of(self._part(use, settings, "--verifier"), f"--verifier {name}")
        if not any(samples_rollouts(node) for node in self._replay.graph.nodes):
            raise ConfigError(
                f"{self._replay.path}: its rewards were imported, and nothing in it can verify a new response. Name "
                "what can: --verifier verifier.math, or --verifier path/to/file.py:function."
            )
        return cast(Verifier, self._first(Verifier, iteration))

    def _part(self, use: str, settings: Mapping[str, Any], option: str) -> Component:
        component: Component = build_component(use, settings, f"{option} {use}")
        component.setup(Context(node=option.lstrip("-"), model=self._model))
        self._parts.append(component)
        return component

    @property
    def _model(self) -> ModelSpec:
        return self._replay.experiment.model

    def _asker(
        self, client: Client, plan: Plan, seeds: Mapping[State, int]
    ) -> Callable[[State], tuple[list[str], int]]:
        s = self.settings
        decode = load_tokenizer(self._model).decode

        def ask(state: State) -> tuple[list[str], int]:
            body = {
                "model": s.model,
                "prompt": decode(list(state)) if s.text else list(state),
                "n": s.rollouts,
                "max_tokens": plan.limit[state],
                "temperature": plan.rows.temperature,
                "seed": seeds[state],
                # Servers that take texts alone may know no other fields.
                **({} if s.text else WHOLE),
            }
            url = f"{s.url.rstrip('/')}/completions"
            reply, reason = client.post(url, body, seconds=s.seconds, retries=3)
            row, start = plan.states[state]
            before = decode(plan.rows.response_tokens.row(row)[:start].tolist())
            try:
                texts = [before + str(choice["text"]) for choice in reply["choices"]]
                if len(texts) != s.rollouts:
                    raise ValueError(f"{len(texts)} choices for n={s.rollouts}")
                return texts, int((reply.get("usage") or {}).get("completion_tokens", -1))
            except (TypeError, KeyError, ValueError, AttributeError) as error:
                why = reason or f"{url}: {error}; expected the reply of an OpenAI-compatible server to /completions"
                raise RunError(
                    f"{why.rstrip('.')}. Nothing was saved; check --endpoint, --model and the server's log."
                ) from error

        return ask

    def _outcomes(
        self, verifier: Verifier, plan: Plan, texts: Mapping[State, Sequence[str]]
    ) -> tuple[dict[State, torch.Tensor], int]:
        """Rewards of the continuations of each state, float64 [rollouts]; and how many were invalid."""
        row = torch.tensor([plan.states[state][0] for state in texts]).repeat_interleave(self.settings.rollouts)
        continued = plan.rows.select(row).replace(
            uid=torch.arange(len(row)), text=[text for several in texts.values() for text in several]
        )
        rewards = finite_rewards(verifier.verify(plan.prompts, continued))
        if not bool(rewards.valid.any()):
            raise RunError(
                f"none of {len(row)} continuations could be verified ({rewards.detail[0]}); name a --verifier."
            )
        value = torch.where(rewards.valid, rewards.value.double(), 0.0).view(len(texts), -1)
        return dict(zip(texts, value, strict=True)), int((~rewards.valid).sum())


def _values(plan: Plan, outcome: Mapping[State, torch.Tensor]) -> SegmentValues:
    """Mean and standard error at each boundary; the reward, which is known, at the end."""
    means: list[list[float]] = []
    errors: list[list[float]] = []
    for i, (prompt, response, ends) in enumerate(
        zip(
            plan.rows.prompt_tokens.to_lists(),
            plan.rows.response_tokens.to_lists(),
            plan.segments.ends.to_lists(),
            strict=True,
        )
    ):
        found = [outcome[(*prompt, *response[:start])] for start in ([0, *ends[:-1]] if ends else [])]
        means.append([*(float(x.mean()) for x in found), float(plan.rewards.value[i])])
        errors.append([*(float(x.std()) / math.sqrt(len(x)) for x in found), 0.0])
    return SegmentValues(
        uid=plan.rows.uid,
        values=Jagged.from_rows(means, torch.float32),
        errors=Jagged.from_rows(errors, torch.float32),
    )
