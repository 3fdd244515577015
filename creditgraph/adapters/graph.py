"""The credit part of a graph, run on the responses of another trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from creditgraph.pipeline.app.credit.sessions import learner_of, samples_rollouts
from creditgraph.pipeline.app.credit.side_by_side import EPISODES, PLAIN
from creditgraph.pipeline.core.errors import ConfigError, DataError, did_you_mean
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Prompts, Rewards, SegmentValues, Trajectories, Turns
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.run.compose.choices import list_choices, search_dirs
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.session import GraphSession

CRITIC = "value.critic"
FOLDER = "--config-dir="
# Kinds of values that the trainer gives, whatever node of the graph makes them in a run.
GIVEN = (Rewards, Prompts, Turns, Policy, Verifier)


class _Session(GraphSession):
    """A session whose sampler, rewards, prompts, policy and critic are another trainer's."""

    host: dict[type, Any]
    rollouts: Rollouts
    spans: Spans

    def begin(self, rollouts: Rollouts, spans: Spans, host: dict[type, Any]) -> None:
        """Forgets the last batch."""
        self.rollouts, self.spans, self.host = rollouts, spans, host
        self._values.clear()
        for runner in self._all_runners:
            runner.context.metrics.clear()

    def supply(self, wire: Wire, iteration: int) -> Any:
        """What the trainer gives, or the output of a node."""
        kind = given(self.graph[wire.source], wire.output)
        if kind is None:
            return super().supply(wire, iteration)
        if kind is SegmentValues:
            return self._values_of_critic(self.graph[wire.source], iteration)
        if self.host.get(kind) is None:
            raise ConfigError(_needs(f"node '{wire.source}'", kind))
        return self.host[kind]

    def _values_of_critic(self, node: Node, iteration: int) -> SegmentValues:
        """The critic's value at the start of each segment or turn; the last one of a row, which none reads, is 0."""
        rows = self.value((node.wires.get("segments") or node.wires["turns"])[0], iteration)
        assert self.rollouts.values is not None  # checked before the first node ran
        tokens = self.spans.gather(self.rollouts.values.float())
        ends = rows.ends.to_lists() if "segments" in node.wires else [[n] for n in tokens.lengths.tolist()]
        starts = Jagged.from_rows([[0, *row] for row in ends], torch.int64)
        padded = torch.cat([tokens.values, torch.zeros(1)])
        at = starts.values + tokens.offsets[:-1][starts.row_ids]
        last = starts.values == tokens.lengths[starts.row_ids]
        return SegmentValues(uid=rows.uid, values=starts.with_values(padded[at].where(~last, 0.0)))

    @property
    def logged(self) -> dict[str, float]:
        """ "node/metric" → number, of the nodes that ran."""
        runners = self._runners.items()
        return {f"{name}/{metric}": x for name, r in runners for metric, x in r.context.metrics.items()}


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
        policy: scores texts, for methods that need it; see `creditgraph.adapters.endpoint.EndpointPolicy`.
        seed: key of random draws.

    Attributes:
        name: the graph's.
        nodes: names of the nodes that run here, in order.
        turns: whether they credit the turns of episodes.
        metrics: those of the nodes in the last call, as "node/metric".

    Raises:
        ConfigError: there is no such graph, or it needs responses, verdicts or a policy that no trainer gives.
    """

    def __init__(self, graph: str, *overrides: str, policy: Policy | None = None, seed: int = 0) -> None:
        self.name = graph
        self.metrics: dict[str, float] = {}
        folders = [o.removeprefix(FOLDER) for o in overrides if o.startswith(FOLDER)]
        if "=" not in graph and graph not in (names := graph_names(folders)):
            raise ConfigError(f"no graph '{graph}'; expected one of {', '.join(names)}.{did_you_mean(graph, names)}")
        files = [o.removeprefix(OPTION) for o in overrides if o.startswith(OPTION)]
        settings = [o for o in overrides if not o.startswith((FOLDER, OPTION))]
        chosen = graph if "=" in graph else f"graph={graph}"
        experiment = build_experiment(compose([chosen, *settings, "run.device=cpu"], folders), graph)
        self._graph = experiment.graph
        self._learner = learner_of(self._graph)
        self._policy = policy
        self._iteration = 0
        self.nodes = _running(self._graph, self._learner)
        self.turns = any(node.use == EPISODES for node in self._graph.nodes)
        self._check(settings)
        self._session = _Session(experiment, seed=seed)
        self._record = Record(Path(files[-1])) if files else None

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
        if self._policy is not None and rollouts.responses is None and rollouts.tokens is not None:
            pieces = whole_rows(rollouts.trained, gaps=True).gather(rollouts.tokens).to_lists()
            rollouts = replace(rollouts, responses=self._policy.tokenizer.batch_decode(pieces))
        iteration, self._iteration = self._iteration, self._iteration + 1
        spans = (
            turns_of(rollouts.trained)
            if self.turns
            else whole_rows(rollouts.trained, self._reads_text(), rollouts.first)
        )
        group = places_of_groups(rollouts.group)
        uid = torch.arange(len(spans.row)) + (iteration << 32)
        host: dict[type, Any] = {
            Trajectories: trajectories_of(rollouts, spans, group, uid),
            Rewards: rewards_of(rollouts, spans.row, uid),
            Prompts: prompts_of(rollouts, group),
            Turns: turn_rows(rollouts, spans, uid) if self.turns else None,
            Policy: self._policy,
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

    def _check(self, settings: Sequence[str]) -> None:
        """Raises ConfigError where the graph needs what no trainer gives, or a setting has no effect in one."""
        place = f"graph '{self.name}'"
        for setting in settings:
            name, _, field = setting.partition("=")[0].lstrip("+~").partition(".")
            idle = name not in self.nodes and any(name == node.name for node in self._graph.nodes)
            # Another component, or other wires, may change which nodes run.
            if idle and field.split(".")[0] not in ("use", "in", "objective"):
                raise ConfigError(
                    f"{place}: {setting} has no effect here, where another trainer samples, rewards and learns. "
                    f"Expected a setting of {', '.join(self.nodes)} or learner.objective."
                )
        samplers = [node for node in self._graph.nodes if samples_rollouts(node)]
        if [node.use for node in samplers if node.use not in (*PLAIN, EPISODES)] or len(samplers) != 1:
            own = ", ".join(node.use for node in samplers)
            raise ConfigError(
                f"{place}: it samples responses of its own ({own}), which another trainer does not have; expected one "
                "sampler of independent responses or episodes. Train it with `creditgraph train`."
            )
        for node in self._running_nodes():
            kinds = {given(self._graph[w.source], w.output) for wires in node.wires.values() for w in wires}
            if Verifier in kinds:
                raise ConfigError(_needs(f"{place}, node '{node.name}'", Verifier))
            if Policy in kinds and self._policy is None:
                raise ConfigError(_needs(f"{place}, node '{node.name}'", Policy))
            if node.cls.placement == "collective" and node.use != CRITIC:
                raise ConfigError(
                    f"{place}: {node.use} trains a model of its own, which another trainer does not hold. Train it "
                    "with `creditgraph train`."
                )
            if node.use == "segmenter.thought":
                raise ConfigError(
                    f"{place}: segmenter.thought reads where thoughts end, which another trainer does not record; set "
                    "segmenter.use=segmenter.keyword_entropy or segmenter.use=segmenter.fixed."
                )
        if self._reads_text() and not any(s.startswith("model") for s in settings):
            raise ConfigError(f"{place}: it reads texts; give the folder or hub name of the tokenizer, model.path=….")

    def check_given(self, *, tokens: bool = True, values: bool) -> None:
        """Checks that a trainer gives what the graph reads, before it samples anything.

        Args:
            tokens, values: whether `Rollouts` will have them.

        Raises:
            ConfigError: the graph reads texts or a critic's values, which the trainer does not give.
        """
        place = f"graph '{self.name}'"
        if self._record is not None and not tokens:
            raise ConfigError(f"{place}: {OPTION} writes token ids, but the trainer's hook passes none.")
        if self._reads_text() and not tokens:
            raise ConfigError(
                f"{place}: it reads texts, but the trainer's hook passes no token ids; see Rollouts.tokens."
            )
        if not values and any(self._graph[w.source].use == CRITIC for w in self._wires()):
            raise ConfigError(f"{place}: it reads values, but the trainer gives none; see Rollouts.values.")

    def _check_rollouts(self, rollouts: Rollouts) -> None:
        place = f"graph '{self.name}'"
        self.check_given(tokens=rollouts.tokens is not None, values=rollouts.values is not None)
        if self._reads_text() and not self.turns and len(torch.unique(rollouts.first)) < len(rollouts):
            raise DataError(
                f"{place}: it reads texts, and the steps of an episode have none in one piece. Give each response as "
                "one row, or choose a graph of turns."
            )

    def _running_nodes(self) -> list[Node]:
        return [self._graph[name] for name in self.nodes]

    def _wires(self) -> list[Wire]:
        return [wire for node in self._running_nodes() for wires in node.wires.values() for wire in wires]

    def _reads_text(self) -> bool:
        nodes = self._running_nodes()
        return any("policy" in n.wires or n.use == "segmenter.keyword_entropy" for n in nodes)


def given(node: Node, output: str) -> type | None:
    """The kind of value that a trainer gives in place of this output; None where the node runs."""
    socket = node.sockets.outputs[output]
    if node.use == CRITIC and socket.carries(SegmentValues):
        return SegmentValues
    kinds = ((Trajectories,) if samples_rollouts(node) else ()) + GIVEN
    return next((kind for kind in kinds if socket.carries(kind)), None)


def _running(graph: Any, learner: Node) -> tuple[str, ...]:
    """Names of the nodes that the learner's credit needs and that no trainer replaces."""
    wanted: set[str] = set()
    queue = [learner.wires["credit"][0]]
    while queue:
        wire = queue.pop()
        node = graph[wire.source]
        kind = given(node, wire.output)
        if kind is SegmentValues:
            queue += node.wires.get("segments", [])
        if kind is None and node.name not in wanted:
            wanted.add(node.name)
            queue += [w for wires in node.wires.values() for w in wires]
    return tuple(node.name for node in graph.nodes if node.name in wanted)


def _needs(place: str, kind: type) -> str:
    if kind is Policy:
        return f"{place} scores texts with the policy; pass policy=EndpointPolicy(…) of creditgraph.adapters.endpoint."
    return f"{place} needs a {kind.__name__}, which no other trainer gives. Train it with `creditgraph train`."


def graph_names(folders: Sequence[str | Path] = ()) -> list[str]:
    """Names of the graphs that ship, and of those in the given folders."""
    return sorted(list_choices("graph", search_dirs(folders)))
