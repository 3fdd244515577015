"""The credit part of a graph, run on the responses of another trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditgraph.adapters.hosted import CRITIC, HostedSession, given, given_kinds, needed, running
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
from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.rollouts.requests import SAMPLING_NAMES, SamplingSettings
from creditgraph.components.text.stops import ends_of_thoughts, token_texts
from creditgraph.pipeline.app.credit.sessions import learner_of, samples_rollouts
from creditgraph.pipeline.app.credit.side_by_side import EPISODES, PLAIN
from creditgraph.pipeline.core.errors import ConfigError, DataError, did_you_mean
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Prompts, Rewards, Trajectories, Turns
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.run.compose.choices import list_choices, search_dirs
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

THOUGHTS = "segmenter.thought"
FOLDER = "--config-dir="


class CreditGraph:
    """The part of a graph between its sampler and its learner, on responses that another trainer sampled and rewarded.

        credit = CreditGraph("gigpo", "advantage.omega=0.5")
        advantages = credit(Rollouts(mask=response_mask, rewards=token_level_rewards, group=uid, tokens=responses))

    Each call is one iteration. The trainer's rewards stand for all nodes that make rewards, its values for a critic;
    all other nodes run as in a run, with their settings. One process credits the batch, and groups must be whole.

    Args:
        graph: a file of configs/graph without its ending, or "recipe=NAME".
        overrides: settings, as on the command line; "--config-dir=FOLDER" adds a folder with graphs of one's own, and
            "--record=FILE" writes the first groups of each batch with their credit, for `creditgraph import`.
        policy: scores texts, for methods that need it; see `creditgraph.adapters.endpoint.EndpointPolicy`. A trainer
            whose own model does that gives it later (`attach`).
        seed: key of random draws.

    Attributes:
        name: the graph's.
        nodes: names of the nodes that run here, in order.
        turns: whether they credit the turns of episodes.
        scores, samples: whether they score texts with a policy, or sample and verify with it.
        policy: what scores and samples; None without.
        metrics: those of the nodes in the last call, as "node/metric".

    Raises:
        ConfigError: there is no such graph, or it needs responses or models that no trainer gives.
    """

    def __init__(self, graph: str, *overrides: str, policy: Policy | None = None, seed: int = 0) -> None:
        self.name = graph
        self.metrics: dict[str, float] = {}
        folders = [o.removeprefix(FOLDER) for o in overrides if o.startswith(FOLDER)]
        if "=" not in graph and graph not in (names := graph_names(folders)):
            raise ConfigError(f"no graph '{graph}'; expected one of {', '.join(names)}.{did_you_mean(graph, names)}")
        files = [o.removeprefix(OPTION) for o in overrides if o.startswith(OPTION)]
        self._settings = [o for o in overrides if not o.startswith((FOLDER, OPTION))]
        self._chosen, self._folders, self._seed = graph if "=" in graph else f"graph={graph}", folders, seed
        self.policy = self._own_policy = policy
        self._verifier: Verifier | None = None
        self._iteration = 0
        self._record = Record(Path(files[-1])) if files else None
        self._build()

    def _build(self, *more: str) -> None:
        settings = [self._chosen, *self._settings, *more, "run.device=cpu"]
        self._experiment = build_experiment(compose(settings, self._folders), self.name)
        self._graph = self._experiment.graph
        self._learner = learner_of(self._graph)
        self.nodes = running(self._graph, self._learner)
        self.turns = any(node.use == EPISODES for node in self._graph.nodes)
        kinds = set[type | None]().union(*(given_kinds(self._graph, node) for node in self._running_nodes()))
        self.scores, self.samples = Policy in kinds, Verifier in kinds
        self._check()
        self._session = HostedSession(self._experiment, seed=self._seed)

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
        continuing = [node.name for node in self._running_nodes() if isinstance(node.config, SamplingSettings)]
        fixed = [f"{node}.{name}" for node in continuing for name in SAMPLING_NAMES]
        for setting in self._settings:
            if setting.partition("=")[0].startswith(tuple(fixed)):
                raise ConfigError(
                    f"{place}: {setting} has no effect here, where the trainer continues its responses as it samples "
                    "them. Leave it out."
                )
        self.policy = policy if self._own_policy is None else self._own_policy
        self._verifier = verifier
        if continuing:
            sampling = {"mode": "plain", "temperature": temperature, "max_tokens": max_tokens}
            self._build(*(f"{node}.{name}={value}" for node in continuing for name, value in sampling.items()))

    @property
    def objective(self) -> ObjectiveSettings:
        """Settings of the graph's loss."""
        settings: ObjectiveSettings = self._learner.config.objective
        return settings

    @property
    def reads_tokens(self) -> bool:
        """Whether token ids have a part in it: texts, states of turns, or a record."""
        return self.turns or self._record is not None or self._reads_text()

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
        if not bool(advantages.isfinite().all()):
            raise DataError(
                f"graph '{self.name}': its credit is not a number at {int((~advantages.isfinite()).sum())} tokens. A "
                "node reads what the rollouts lack; see Rollouts.logprobs and Rollouts.entropies."
            )
        if by_response and differs_within(advantages, rollouts.trained):
            raise ConfigError(
                f"graph '{self.name}': its credit differs within responses, but with {by_response} the trainer's loss "
                "moves all tokens of a response alike, by the mean of their advantages. Choose a ratio per token, or a "
                "graph that credits whole responses."
            )
        if record:
            self.record(rollouts, advantages)
        return advantages.to(rollouts.mask.device)

    def record(self, rollouts: Rollouts, advantages: Tensor) -> None:
        """Writes a batch with its credit, if the graph was given a file."""
        if self._record is not None:
            self._record.write(rollouts, advantages, self.turns)

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
            Rewards: rewards_of(rollouts, spans.row, uid),
            Prompts: prompts_of(rollouts, group),
            Turns: turn_rows(rollouts, spans, uid) if self.turns else None,
            Policy: self.policy,
            Verifier: self._verifier,
        }
        self._session.begin(rollouts, spans, host)
        credit: Credit = self._session.value(self._learner.wires["credit"][0], iteration)
        self.metrics = self._session.logged
        return credit, spans

    def described(self, source: str) -> tuple[dict[str, Any], str]:
        """The nodes that run here, as `nodes` of a configuration, and the wire with their credit.

        What a trainer gives is read from the outputs prompts, trajectories, rewards and turns of the node `source`.
        """
        outputs = {kind: kind.__name__.lower() for kind in (Prompts, Trajectories, Rewards, Turns)}

        def wire(old: Wire) -> str:
            kind = given(self._graph[old.source], old.output)
            if kind is not None and kind not in outputs:
                raise ConfigError(
                    f"graph '{self.name}': it reads a {kind.__name__}, which recorded rollouts do not have."
                )
            return str(old) if kind is None else f"{source}.{outputs[kind]}"

        nodes = {
            node.name: {
                "use": node.use,
                "in": {socket: [wire(w) for w in wires] for socket, wires in node.wires.items()},
                "config": dict(node.settings),
            }
            for node in self._running_nodes()
        }
        return nodes, wire(self._learner.wires["credit"][0])

    def _check(self) -> None:
        """Raises ConfigError where the graph needs what no trainer gives, or a setting has no effect in one."""
        place = f"graph '{self.name}'"
        samplers = [node for node in self._graph.nodes if samples_rollouts(node)]
        for setting in self._settings:
            name, _, field = setting.partition("=")[0].lstrip("+~").partition(".")
            idle = name not in self.nodes and any(name == node.name for node in self._graph.nodes)
            splits = self._split and field == "mode" and name == samplers[0].name
            # Another component, or other wires, may change which nodes run.
            if idle and not splits and field.split(".")[0] not in ("use", "in", "objective"):
                raise ConfigError(
                    f"{place}: {setting} has no effect here, where another trainer samples, rewards and learns. "
                    f"Expected a setting of {', '.join(self.nodes)} or learner.objective."
                )
        if [node.use for node in samplers if node.use not in (*PLAIN, EPISODES)] or len(samplers) != 1:
            own = ", ".join(node.use for node in samplers)
            raise ConfigError(
                f"{place}: it samples responses of its own ({own}), which another trainer does not have; expected one "
                "sampler of independent responses or episodes. Train it with `creditgraph train`."
            )
        for node in self._running_nodes():
            if node.cls.placement == "collective" and node.use != CRITIC:
                raise ConfigError(
                    f"{place}: {node.use} trains a model of its own, which another trainer does not hold. Train it "
                    "with `creditgraph train`."
                )
            if node.use == "advantage.self_teacher" and node.config.context == "solution":
                raise ConfigError(
                    f"{place}: {node.use} shows reference solutions, which no trainer gives. Train it with "
                    "`creditgraph train`."
                )
            if node.use == THOUGHTS and not self._split:
                raise ConfigError(
                    f"{place}: segmenter.thought reads where thoughts end, which another trainer does not record; set "
                    f"{samplers[0].name}.mode=line or {samplers[0].name}.mode=sentence, and lines or sentences of its "
                    "responses are thoughts, or segmenter.use=segmenter.fixed."
                )
        if self._reads_text() and not any(s.startswith("model") for s in self._settings):
            raise ConfigError(f"{place}: it reads texts; give the folder or hub name of the tokenizer, model.path=….")

    @property
    def reads_entropies(self) -> bool:
        """Whether the entropies of the policy have a part in it."""
        return any("entropies" in node.cls.needs_of(node.config) for node in self._running_nodes())

    def check_given(
        self,
        *,
        tokens: bool = True,
        values: bool,
        entropies: bool = False,
        policy: bool = False,
        verifier: bool = False,
    ) -> None:
        """Checks that a trainer gives what the graph reads, before it samples anything.

        Args:
            tokens, values, entropies: whether `Rollouts` will have them.
            policy, verifier: whether the trainer attaches its model and its reward functions.

        Raises:
            ConfigError: the graph reads token ids, values, entropies or a policy, which the trainer does not give.
        """
        place = f"graph '{self.name}'"
        for node in self._running_nodes():
            where = f"{place}, node '{node.name}'"
            kinds = given_kinds(self._graph, node)
            if Verifier in kinds and self._verifier is None and not verifier:
                raise ConfigError(needed(where, Verifier))
            if Policy in kinds and self.policy is None and not policy:
                raise ConfigError(needed(where, Policy))
            if Policy in kinds and self.policy is None and not self._reads_trained(node):
                raise ConfigError(
                    f"{where} scores texts with another model than the one that is trained; pass "
                    "policy=EndpointPolicy(…) of creditgraph.adapters.endpoint, of a server that holds it."
                )
        if self._record is not None and not tokens:
            raise ConfigError(f"{place}: {OPTION} writes token ids, but the trainer's hook passes none.")
        if self._reads_text() and not tokens:
            raise ConfigError(
                f"{place}: it reads texts, but the trainer's hook passes no token ids; see Rollouts.tokens."
            )
        if not entropies and self.reads_entropies:
            raise ConfigError(
                f"{place}: it reads entropies, but the trainer gives none; see Rollouts.entropies. Segments can be "
                "those of segmenter.use=segmenter.fixed."
            )
        if not values and any(self._graph[w.source].use == CRITIC for w in self._wires()):
            raise ConfigError(f"{place}: it reads values, but the trainer gives none; see Rollouts.values.")

    def _check_rollouts(self, rollouts: Rollouts) -> None:
        place = f"graph '{self.name}'"
        has = {name: getattr(rollouts, name) is not None for name in ("tokens", "values", "entropies")}
        self.check_given(**has)
        if self._reads_text() and not self.turns and len(torch.unique(rollouts.first)) < len(rollouts):
            raise DataError(
                f"{place}: it reads texts, and the steps of an episode have none in one piece. Give each response as "
                "one row, or choose a graph of turns."
            )

    def _reads_trained(self, node: Node) -> bool:
        """Whether the policy that a node reads has the learner's weights."""
        engine = self._graph[node.wires["policy"][0].source]
        return [wire.source for wire in engine.wires.get("weights", [])] == [self._learner.name]

    def _running_nodes(self) -> list[Node]:
        return [self._graph[name] for name in self.nodes]

    def _wires(self) -> list[Wire]:
        return [wire for node in self._running_nodes() for wires in node.wires.values() for wire in wires]

    @property
    def _split(self) -> str:
        """ "line" or "sentence": where the thoughts end that a node of the graph reads; "" if none does."""
        mode = next((getattr(n.config, "mode", "") for n in self._graph.nodes if samples_rollouts(n)), "")
        return mode if mode in ("line", "sentence") and any(n.use == THOUGHTS for n in self._running_nodes()) else ""

    @property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._experiment.model) if self.policy is None else self.policy.tokenizer

    def _reads_text(self) -> bool:
        nodes = self._running_nodes()
        return any("policy" in n.wires or n.use in ("segmenter.keyword_entropy", THOUGHTS) for n in nodes)


def graph_names(folders: Sequence[str | Path] = ()) -> list[str]:
    """Names of the graphs that ship, and of those in the given folders."""
    return sorted(list_choices("graph", search_dirs(folders)))
