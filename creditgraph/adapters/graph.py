"""The credit part of a graph, run on the responses of another trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditgraph.adapters.endpoint import EndpointPolicy
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
    uids,
    whole_rows,
)
from creditgraph.components.http import check_url
from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.rollouts.requests import SAMPLING_NAMES
from creditgraph.components.text.stops import ends_of_thoughts, token_texts
from creditgraph.components.verifier.base import VerifierComponent
from creditgraph.pipeline.core.errors import ConfigError, DataError, did_you_mean
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Prompts, Rewards, Trajectories, Turns, check_aligned
from creditgraph.pipeline.run.compose.choices import list_choices, search_dirs

FOLDER = "--config-dir="
RIGHT = "--right-above="
ENDPOINT = "--endpoint="
MODEL = "--model="


class CreditGraph(HostedGraph):
    """The part of a graph between its sampler and its learner, on responses that another trainer sampled and rewarded.

        credit = CreditGraph("gigpo", "advantage.omega=0.5")
        advantages = credit(Rollouts(mask=response_mask, rewards=token_level_rewards, group=uid, tokens=responses))

    Each call is one iteration. The trainer's rewards stand for all nodes that make rewards, its values for a critic;
    all other nodes run as in a run, with their settings. One process credits the batch, and groups must be whole.

    Args:
        graph: a file of configs/graph without its ending, or "recipe=NAME".
        overrides: settings, as on the command line, among them run.seed for the key of random draws.
            "--config-dir=FOLDER" adds a folder with graphs of one's own, "--record=FILE" writes the first groups of
            each batch with their credit, for `creditgraph import`, "--right-above=NUMBER" says which rewards are those
            of right responses, by default those above 0, and "--endpoint=URL", maybe with "--model=NAME", names a
            server that is asked, by a key in OPENAI_API_KEY (see `adapters.endpoint.EndpointPolicy`).
        policy: scores and continues texts, for methods that need it, in the place of an endpoint. A trainer whose own
            model does that gives it later (`attach`).

    Attributes (further ones are those of `HostedGraph`):
        right_above: rewards above it are those of right responses.
        metrics: those of the nodes in the last call, as "node/metric".

    Raises:
        ConfigError: there is no such graph, or it needs responses or models that no trainer gives.
    """

    def __init__(self, graph: str, *overrides: str, policy: Policy | None = None) -> None:
        self.metrics: dict[str, float] = {}
        given: dict[str, list[str]] = {name: [] for name in (FOLDER, OPTION, RIGHT, ENDPOINT, MODEL)}
        settings: list[str] = []
        for override in overrides:
            name, equals, value = override.partition("=")
            given.get(name + equals, settings).append(value if name + equals in given else override)
        folders = given[FOLDER]
        if "=" not in graph and graph not in (names := graph_names(folders)):
            raise ConfigError(f"no graph '{graph}'; expected one of {', '.join(names)}.{did_you_mean(graph, names)}")
        self.right_above = [0.0, *map(_number, given[RIGHT])][-1]
        if bool(given[MODEL]) > bool(given[ENDPOINT]) or (given[ENDPOINT] and policy is not None):
            raise ConfigError(
                f"graph '{graph}': expected {ENDPOINT}URL, maybe with {MODEL}NAME, or policy=, or neither."
            )
        served = None
        if given[ENDPOINT]:
            try:
                check_url(given[ENDPOINT][-1])
            except ValueError as error:
                raise ConfigError(f"graph '{graph}': {ENDPOINT}{given[ENDPOINT][-1]}: {error}") from None
            key = os.environ.get("OPENAI_API_KEY", "")
            policy = served = EndpointPolicy(given[ENDPOINT][-1], ["", *given[MODEL]][-1], key=key)
        super().__init__(graph, settings, policy, records=bool(given[OPTION]))
        self._chosen = (graph if "=" in graph else f"graph={graph}", folders)
        self._own_policy = policy
        self._iteration = 0
        self._record = Record(Path(given[OPTION][-1])) if given[OPTION] else None
        self._start()
        if served is not None and not self.scores:
            raise ConfigError(f"graph '{graph}': it asks no model, so {ENDPOINT} has no effect. Leave it out.")
        if served is not None:
            served.tokenizer = self.tokenizer
        if policy is not None and self.samples:
            self._sample_alike(None, None)

    def _start(self, *more: str) -> None:
        self.build(*self._chosen, *more)
        self._session = HostedSession(self._experiment)
        self._session.gives = self.gives

    def attach(
        self,
        policy: Policy,
        verifier: Verifier | None = None,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Takes a trainer's own model and reward functions, unless the graph was given a policy.

        Args:
            policy: what nodes score and sample with.
            verifier: what they verify with; by default the graph's own verifier does.
            temperature, max_tokens: of the trainer's responses, for nodes that continue them; by default the settings
                of these nodes.

        Raises:
            ConfigError: the graph samples and was given a policy, settings of sampling lack or have no effect, or a
                server would score at another temperature than the trainer's.
        """
        if self.samples and self._own_policy is not None:
            raise ConfigError(
                f"graph '{self.name}': it continues responses, which the trainer does itself. Leave out policy= and "
                f"{ENDPOINT}."
            )
        if temperature is not None and isinstance(policy, EndpointPolicy):
            self.sampled_at(temperature)
        self.policy = policy if self._own_policy is None else self._own_policy
        if isinstance(policy, EndpointPolicy) and policy.tokenizer is None:
            policy.tokenizer = self.tokenizer
        self.verifier = verifier
        self._sample_alike(temperature, max_tokens)

    def sampled_at(self, temperature: float) -> None:
        """Raises ConfigError where a trainer samples at another temperature than servers score at."""
        if temperature != 1 and self.scores and not self.samples:
            raise ConfigError(
                f"graph '{self.name}': servers give log-probs at temperature 1, but this trainer samples at "
                f"{temperature:g}. Set its temperature to 1, or choose a graph that reads no log-probs."
            )

    def _sample_alike(self, temperature: float | None, max_tokens: int | None) -> None:
        """Has nodes sample as the trainer does; None are their own settings, among which there must be a budget."""
        place, nodes = f"graph '{self.name}'", self._sampling_nodes()
        chosen = [setting.partition("=")[0] for setting in self._settings]
        lacking = [f"{node.name}.max_tokens" for node in nodes if f"{node.name}.max_tokens" not in chosen]
        if max_tokens is None and lacking:
            raise ConfigError(
                f"{place}: it samples; say how many tokens a whole response may have, {lacking[0]}=4096 for example."
            )
        # Where thoughts end is up to a node that samples what is trained on.
        fixed = [] if self.makes_rows else [f"{node.name}.mode" for node in nodes]
        if temperature is not None:
            fixed += [f"{node.name}.{name}" for node in nodes for name in SAMPLING_NAMES if name != "mode"]
            # Of what the model is asked about its responses, the trainer keeps temperature and budget.
            asks = [node for node in self._running_nodes() if "policy" in node.wires]
            fixed += [f"{node.name}.{x}" for node in asks for x in ("top_p", "top_k", "stop")]
        for setting in self._settings:
            if setting.partition("=")[0].startswith(tuple(fixed)):
                raise ConfigError(
                    f"{place}: {setting} has no effect here, where the trainer continues its responses as it samples "
                    "them. Leave it out."
                )
        sampled: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
        settings = {name: value for name, value in sampled.items() if value is not None}
        settings["mode"] = (self.makes_rows and self._mode) or "plain"
        if nodes:
            self._start(*(f"{node.name}.{name}={value}" for node in nodes for name, value in settings.items()))

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
        self._session.begin({Prompts: prompts, Policy: self.policy, Verifier: self.verifier})
        wires = self._learner.wires
        trajectories: Trajectories = self._session.value(wires["trajectories"][0], iteration)
        credit: Credit = self._session.value(wires["credit"][0], iteration)
        check_aligned(trajectories, credit)
        self.metrics = self._session.logged
        return trajectories, credit

    def credit(self, rollouts: Rollouts) -> tuple[Credit, Spans]:
        """The graph's credit with one row per episode, or per turn; and which tokens of the rollouts its rows are."""
        self._check_rollouts(rollouts)
        if self.policy is not None and self.scores:
            rollouts = self._decoded(rollouts, self.policy.tokenizer)
        iteration, self._iteration = self._iteration, self._iteration + 1
        spans = (
            turns_of(rollouts.trained)
            if self.turns
            else whole_rows(rollouts.trained, self._reads_text(), rollouts.first)
        )
        group = places_of_groups(rollouts.group)
        uid, group = uids(torch.arange(len(spans.row)), iteration), uids(group, iteration)
        trajectories = trajectories_of(rollouts, spans, group, uid)
        if self._split:
            pieces = token_texts(self.tokenizer, trajectories.response_tokens)
            ends = Jagged.from_rows([ends_of_thoughts(row, self._split) for row in pieces], torch.int32)
            trajectories = trajectories.replace(thought_ends=ends)
        host: dict[type, Any] = {
            Trajectories: trajectories,
            Rewards: rewards_of(rollouts, spans.row, uid, self.right_above),
            Prompts: prompts_of(rollouts, group),
            Turns: turn_rows(rollouts, spans, uid) if self.turns else None,
            Policy: self.policy,
            Verifier: self.verifier,
        }
        self._session.begin(host, (rollouts, spans))
        credit: Credit = self._session.value(self._learner.wires["credit"][0], iteration)
        self.metrics = self._session.logged
        return credit, spans

    @staticmethod
    def _decoded(rollouts: Rollouts, tokenizer: Any) -> Rollouts:
        """The rollouts with the texts of their tokens, where they lack them."""
        texts: dict[str, Any] = {}
        if rollouts.responses is None and rollouts.tokens is not None:
            pieces = whole_rows(rollouts.trained, gaps=True).gather(rollouts.tokens).to_lists()
            texts["responses"] = tokenizer.batch_decode(pieces)
        if rollouts.texts is None and rollouts.tokens is not None:
            # Some trainers' rows begin with their prompts.
            begins = rollouts.trained.int().argmax(1).tolist()
            before = [row[:begin] for row, begin in zip(rollouts.tokens.tolist(), begins, strict=True)]
            prompts = [[]] * len(rollouts) if rollouts.prompts is None else rollouts.prompts
            whole = [[*prompt, *rest] for prompt, rest in zip(prompts, before, strict=True)]
            texts["texts"] = tokenizer.batch_decode(whole, skip_special_tokens=True)
        return replace(rollouts, **texts)

    def _check_rollouts(self, rollouts: Rollouts) -> None:
        place = f"graph '{self.name}'"
        has = {name: getattr(rollouts, name) is not None for name in ("tokens", "values", "logprobs", "entropies")}
        self.check_given(**has)
        if self.scores and rollouts.prompts is None and bool((rollouts.trained[:, :1]).any()):
            raise DataError(f"{place}: it asks a model, but the rollouts have no prompts; see Rollouts.prompts.")
        if self.samples and not whole_rows(rollouts.trained, gaps=True).at.lengths.equal(rollouts.trained.sum(1)):
            raise DataError(
                f"{place}: it continues responses from the middle, but in one of them the policy did not sample all "
                "tokens, so what follows is not up to it alone. Choose a graph that samples nothing."
            )
        for node in () if rollouts.answers is not None else self._running_nodes():
            if (
                isinstance(node.cls, type)
                and issubclass(node.cls, VerifierComponent)
                and node.cls.references_of(node.config)
            ):
                raise DataError(
                    f"{place}: {node.use} reads reference answers, which the rollouts lack; see Rollouts.answers. "
                    "verifier.use=verifier.function takes a function of yours, which need not read them."
                )
        if self._reads_text() and not self.turns and len(torch.unique(rollouts.first)) < len(rollouts):
            raise DataError(
                f"{place}: it reads texts, and the steps of an episode have none in one piece. Give each response as "
                "one row, or choose a graph of turns."
            )

    @property
    def takes_rewards(self) -> bool:
        """Whether a trainer's rewards verify what it samples: no setting chooses another verifier."""
        return self.samples and not any(setting.startswith("verifier.") for setting in self._settings)

    @property
    def tokenizer(self) -> Any:
        """The policy's, or that of `model.path`."""
        known = None if self.policy is None else self.policy.tokenizer
        return load_tokenizer(self._experiment.model) if known is None else known


def _number(option: str) -> float:
    try:
        return float(option)
    except ValueError:
        raise ConfigError(f"{RIGHT}{option}: expected a number, a reward that right responses are above.") from None


def graph_names(folders: Sequence[str | Path] = ()) -> list[str]:
    """Names of the graphs that ship, and of those in the given folders."""
    return sorted(list_choices("graph", search_dirs(folders)))
