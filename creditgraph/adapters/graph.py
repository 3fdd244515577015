"""The credit part of a graph, run on the responses of another trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditgraph.adapters.hosted import HostedSession
from creditgraph.adapters.hosted_graph import HostedGraph
from creditgraph.adapters.record import OPTION, Record
from creditgraph.adapters.rows import (
    Rollouts,
    Spans,
    differs_within,
    places_of_groups,
    prompts_of,
    rewards_of,
    trajectories_of,
    turn_rows,
    turns_of,
    whole_rows,
)
from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.rollouts.requests import SAMPLING_NAMES, SamplingSettings
from creditgraph.components.text.stops import ends_of_thoughts, token_texts
from creditgraph.pipeline.core.errors import ConfigError, DataError, did_you_mean
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Prompts, Rewards, Trajectories, Turns, check_aligned
from creditgraph.pipeline.run.compose.choices import list_choices, search_dirs

FOLDER = "--config-dir="
RIGHT = "--right-above="


class CreditGraph(HostedGraph):
    """The part of a graph between its sampler and its learner, on responses that another trainer sampled and rewarded.

        credit = CreditGraph("gigpo", "advantage.omega=0.5")
        advantages = credit(Rollouts(mask=response_mask, rewards=token_level_rewards, group=uid, tokens=responses))

    Each call is one iteration. The trainer's rewards stand for all nodes that make rewards, its values for a critic;
    all other nodes run as in a run, with their settings. One process credits the batch, and groups must be whole.

    Args:
        graph: a file of configs/graph without its ending, or "recipe=NAME".
        overrides: settings, as on the command line; "--config-dir=FOLDER" adds a folder with graphs of one's own, and
            "--record=FILE" writes the first groups of each batch with their credit, for `creditgraph import`, and
            "--right-above=NUMBER" says which rewards are those of right responses, by default those above 0.
        policy: scores texts, for methods that need it; see `creditgraph.adapters.endpoint.EndpointPolicy`. A trainer
            whose own model does that gives it later (`attach`).
        seed: key of random draws.

    Attributes (further ones are those of `HostedGraph`):
        right_above: rewards above it are those of right responses.
        metrics: those of the nodes in the last call, as "node/metric".

    Raises:
        ConfigError: there is no such graph, or it needs responses or models that no trainer gives.
    """

    def __init__(self, graph: str, *overrides: str, policy: Policy | None = None, seed: int = 0) -> None:
        self.metrics: dict[str, float] = {}
        folders = [o.removeprefix(FOLDER) for o in overrides if o.startswith(FOLDER)]
        if "=" not in graph and graph not in (names := graph_names(folders)):
            raise ConfigError(f"no graph '{graph}'; expected one of {', '.join(names)}.{did_you_mean(graph, names)}")
        files = [o.removeprefix(OPTION) for o in overrides if o.startswith(OPTION)]
        self.right_above = [0.0, *(_number(o) for o in overrides if o.startswith(RIGHT))][-1]
        settings = [o for o in overrides if not o.startswith((FOLDER, OPTION, RIGHT))]
        super().__init__(graph, settings, policy, records=bool(files))
        self._chosen, self._seed = (graph if "=" in graph else f"graph={graph}", folders), seed
        self._own_policy = policy
        self._iteration = 0
        self._record = Record(Path(files[-1])) if files else None
        self._start()

    def _start(self, *more: str) -> None:
        self.build(*self._chosen, *more)
        self._session = HostedSession(self._experiment, seed=self._seed)
        self._session.makes_rows = self.makes_rows

    def attach(self, policy: Policy, verifier: Verifier | None, *, temperature: float, max_tokens: int) -> None:
        """Takes a trainer's own model and reward functions, unless the graph was given a policy.

        Args:
            policy, verifier: what nodes score, sample and verify with.
            temperature, max_tokens: of the trainer's responses, for nodes that continue them.

        Raises:
            ConfigError: the graph samples and was given a policy or settings of sampling.
        """
        place = f"graph '{self.name}'"
        if self.samples and self._own_policy is not None:
            raise ConfigError(f"{place}: it continues responses, which the trainer does itself. Leave out policy=.")
        sampling = [node for node in self._running_nodes() if isinstance(node.config, SamplingSettings)]
        # Where thoughts end is up to a node that samples what is trained on.
        fixed = [f"{n.name}.{x}" for n in sampling for x in SAMPLING_NAMES if not (self.makes_rows and x == "mode")]
        # Of what the model is asked about its responses, the trainer keeps temperature and budget.
        asks = [node for node in self._running_nodes() if "policy" in node.wires]
        fixed += [f"{node.name}.{x}" for node in asks for x in ("top_p", "top_k", "stop")]
        for setting in self._settings:
            if setting.partition("=")[0].startswith(tuple(fixed)):
                raise ConfigError(
                    f"{place}: {setting} has no effect here, where the trainer continues its responses as it samples "
                    "them. Leave it out."
                )
        self.policy = policy if self._own_policy is None else self._own_policy
        self._verifier = verifier
        if sampling:
            mode = (self.makes_rows and self._mode) or "plain"
            settings = {"mode": mode, "temperature": temperature, "max_tokens": max_tokens}
            self._start(*(f"{node.name}.{name}={value}" for node in sampling for name, value in settings.items()))

    def __call__(self, rollouts: Rollouts, record: bool = True, by_response: str = "") -> Tensor:
        """Advantages, float32 [N, T] on the device of the mask; 0 where a token is not trained on.

        Args:
            rollouts: a batch.
            record: write it with its advantages, if the graph was given a file.
            by_response: the setting of the trainer by which its loss has one ratio per response, if it has. Such a
                loss moves all tokens of a response by the mean of their advantages.

        Raises:
            DataError: the rollouts lack what a node reads.
            ConfigError: `by_response` is given, and tokens of a response have several advantages.
        """
        credit, spans = self.credit(rollouts)
        kept = credit.advantage.with_values(credit.advantage.values.where(credit.mask.values, 0.0))
        advantages = spans.scatter(kept, rollouts.trained).where(rollouts.trained, 0.0)
        self.check_credit(advantages, rollouts.trained, by_response)
        if record:
            self.record(rollouts, advantages)
        return advantages.to(rollouts.mask.device)

    def check_credit(self, advantages: Tensor, trained: Tensor, by_response: str) -> None:
        """Raises as `__call__` for advantages [N, T] of the tokens that are trained on, bool [N, T]."""
        if not bool(advantages.isfinite().all()):
            raise DataError(
                f"graph '{self.name}': its credit is not a number at {int((~advantages.isfinite()).sum())} tokens. A "
                "node reads what the rollouts lack; see Rollouts.logprobs and Rollouts.entropies."
            )
        if by_response and differs_within(advantages, trained):
            raise ConfigError(
                f"graph '{self.name}': its credit differs within responses, but with {by_response} the trainer's loss "
                "moves all tokens of a response alike, by the mean of their advantages. Choose a ratio per token, or a "
                "graph that credits whole responses."
            )

    def record(self, rollouts: Rollouts, advantages: Tensor) -> None:
        """Writes a batch with its credit, if the graph was given a file."""
        if self._record is not None:
            self._record.write(rollouts, advantages, self.turns)

    def rows(self, prompts: Prompts) -> tuple[Trajectories, Credit]:
        """The responses that a graph which `makes_rows` samples to these prompts, row for row with their credit.

        Its policy samples them and its verifier rewards them (`attach`). Each call is one iteration.
        """
        iteration, self._iteration = self._iteration, self._iteration + 1
        self._session.begin({Prompts: prompts, Policy: self.policy, Verifier: self._verifier})
        wires = self._learner.wires
        trajectories: Trajectories = self._session.value(wires["trajectories"][0], iteration)
        credit: Credit = self._session.value(wires["credit"][0], iteration)
        check_aligned(trajectories, credit)
        self.metrics = self._session.logged
        return trajectories, credit

    def credit(self, rollouts: Rollouts) -> tuple[Credit, Spans]:
        """The graph's credit with one row per episode, or per turn; and which tokens of the rollouts its rows are."""
        self._check_rollouts(rollouts)
        if self.policy is not None and rollouts.responses is None and rollouts.tokens is not None:
            pieces = whole_rows(rollouts.trained, gaps=True).gather(rollouts.tokens).to_lists()
            rollouts = replace(rollouts, responses=self.policy.tokenizer.batch_decode(pieces))
        iteration, self._iteration = self._iteration, self._iteration + 1
        spans = (
            turns_of(rollouts.trained)
            if self.turns
            else whole_rows(rollouts.trained, self._reads_text(), rollouts.first)
        )
        group = places_of_groups(rollouts.group)
        uid = torch.arange(len(spans.row)) + (iteration << 32)
        trajectories = trajectories_of(rollouts, spans, group, uid)
        if self._split:
            pieces = token_texts(self._tokenizer, trajectories.response_tokens)
            ends = Jagged.from_rows([ends_of_thoughts(row, self._split) for row in pieces], torch.int32)
            trajectories = trajectories.replace(thought_ends=ends)
        host: dict[type, Any] = {
            Trajectories: trajectories,
            Rewards: rewards_of(rollouts, spans.row, uid, self.right_above),
            Prompts: prompts_of(rollouts, group),
            Turns: turn_rows(rollouts, spans, uid) if self.turns else None,
            Policy: self.policy,
            Verifier: self._verifier,
        }
        self._session.begin(host, (rollouts, spans))
        credit: Credit = self._session.value(self._learner.wires["credit"][0], iteration)
        self.metrics = self._session.logged
        return credit, spans

    def _check_rollouts(self, rollouts: Rollouts) -> None:
        place = f"graph '{self.name}'"
        has = {name: getattr(rollouts, name) is not None for name in ("tokens", "values", "logprobs", "entropies")}
        self.check_given(**has)
        if self._reads_text() and not self.turns and len(torch.unique(rollouts.first)) < len(rollouts):
            raise DataError(
                f"{place}: it reads texts, and the steps of an episode have none in one piece. Give each response as "
                "one row, or choose a graph of turns."
            )

    @property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._experiment.model) if self.policy is None else self.policy.tokenizer


def _number(option: str) -> float:
    try:
        return float(option.removeprefix(RIGHT))
    except ValueError:
        raise ConfigError(f"{option}: expected a number, a reward that right responses are above.") from None


def graph_names(folders: Sequence[str | Path] = ()) -> list[str]:
    """Names of the graphs that ship, and of those in the given folders."""
    return sorted(list_choices("graph", search_dirs(folders)))
