"""A graph of which another trainer runs a part: which nodes run, what they need, and what cannot run there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from creditgraph.adapters.hosted import CRITIC, GIVEN, GIVEN_ROWLESS, given, given_kinds, needed, running
from creditgraph.adapters.record import OPTION
from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.rollouts.requests import SamplingSettings
from creditgraph.pipeline.app.credit.sessions import learner_of, samples_rollouts
from creditgraph.pipeline.app.credit.side_by_side import EPISODES, PLAIN
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Environments, Policy, Verifier
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories, Turns
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

THOUGHTS = "segmenter.thought"
INTERVENES = "expander.intervene"


class HostedGraph:
    """The part of a graph between its sampler and its learner, and what it needs of a trainer.

    Args:
        name: the graph's, for sentences.
        settings: overrides.
        policy: scores texts; None where the trainer's own model does.
        records: whether what it credits is written to a file.

    Attributes:
        name: the graph's.
        nodes: names of the nodes that run here, in order.
        turns: whether they credit the turns of episodes.
        makes_rows: whether the graph samples what it trains on itself, by resets, trees or revisions.
        scores, samples: whether they ask a policy, and whether they sample with it and verify.
        gives: kinds of values that the trainer gives.
        policy: what scores and samples; None without.
        verifier: the trainer's; None where the graph's own verifies what is sampled.
    """

    def __init__(self, name: str, settings: Sequence[str], policy: Policy | None, records: bool) -> None:
        self.name, self._settings, self._records = name, settings, records
        self.policy = policy
        self.verifier: Verifier | None = None

    def build(self, chosen: str, folders: Sequence[str], *more: str) -> None:
        """Composes the graph with its settings and `more`, and checks it.

        Args:
            chosen: "graph=NAME", or "recipe=NAME".
            folders: those with graphs of one's own.
        """
        settings = [chosen, *self._settings, *more, "run.device=cpu"]
        self._experiment = build_experiment(compose(settings, folders), self.name)
        self._graph = self._experiment.graph
        self._learner = learner_of(self._graph)
        self._samplers = [node for node in self._graph.nodes if samples_rollouts(node)]
        self.makes_rows = [node.use in (*PLAIN, EPISODES) for node in self._samplers] != [True]
        verifies = () if self.verifier is None else (Verifier,)
        self.gives: tuple[type, ...] = (*(GIVEN_ROWLESS if self.makes_rows else GIVEN), *verifies)
        self.nodes = running(self._graph, self._learner, self.gives)
        self.turns = any(node.use == EPISODES for node in self._graph.nodes)
        kinds = set[type | None]().union(*(self._given_kinds(node) for node in self._running_nodes()))
        self.scores, self.samples = Policy in kinds, bool(self._sampling_nodes())
        self._check()

    @property
    def objective(self) -> ObjectiveSettings:
        """Settings of the graph's loss."""
        settings: ObjectiveSettings = self._learner.config.objective
        return settings

    @property
    def reads_tokens(self) -> bool:
        """Whether token ids have a part in it: texts, states of turns, or a record."""
        return self.turns or self._records or self._reads_text()

    def described(self, source: str) -> tuple[dict[str, Any], str]:
        """The nodes that run here, as `nodes` of a configuration, and the wire with their credit.

        What a trainer gives is read from the outputs prompts, trajectories, rewards and turns of the node `source`.
        """
        self._check_rows(makes=False)
        outputs = {kind: kind.__name__.lower() for kind in (Prompts, Trajectories, Rewards, Turns)}

        def wire(old: Wire) -> str:
            kind = given(self._graph[old.source], old.output, (*GIVEN, Verifier))
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
        sampler = self._samplers[0].name if self._samplers else ""
        for setting in self._settings:
            name, _, field = setting.partition("=")[0].lstrip("+~").partition(".")
            idle = name not in self.nodes and any(name == node.name for node in self._graph.nodes)
            idle |= name == "run" and field != "seed"
            splits = self._split and field == "mode" and name == sampler
            named = field == "model" and self.policy is not None  # a teacher's, which the policy serves
            # Another component, or other wires, may change which nodes run.
            if idle and not splits and not named and field.split(".")[0] not in ("use", "in", "objective"):
                raise ConfigError(
                    f"{place}: {setting} has no effect here, where another trainer samples, rewards and learns. "
                    f"Expected a setting of {', '.join(self.nodes)} or learner.objective, or run.seed."
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
        if not self.makes_rows:  # which few trainers take
            self._check_texts()

    def _check_texts(self) -> None:
        place, sampler = f"graph '{self.name}'", self._samplers[0].name
        for node in self._running_nodes():
            if self._reads_thoughts(node) and not self._mode:
                fixed = ", or segmenter.use=segmenter.fixed" if node.use == THOUGHTS else ""
                raise ConfigError(
                    f"{place}: {node.use} reads where thoughts end, which another trainer does not record; set "
                    f"{sampler}.mode=line or {sampler}.mode=sentence, and lines or sentences of its responses are "
                    f"thoughts{fixed}."
                )
        if self._reads_text() and not any(s.startswith("model") for s in self._settings):
            raise ConfigError(f"{place}: it reads texts; give the folder or hub name of the tokenizer, model.path=….")

    def reads(self, name: str) -> bool:
        """Whether "logprobs" or "entropies" of the sampled tokens have a part in it."""
        return any(name in node.cls.needs_of(node.config) for node in self._running_nodes())

    @property
    def reads_scores(self) -> bool:
        """Whether either has."""
        return self.reads("logprobs") or self.reads("entropies")

    def check_given(
        self,
        *,
        tokens: bool = True,
        values: bool,
        logprobs: bool = False,
        entropies: bool = False,
        policy: bool = False,
        continues: bool = False,
        rows: bool = False,
    ) -> None:
        """Checks that a trainer gives what the graph reads, before it samples anything.

        Args:
            tokens, values, logprobs, entropies: whether `Rollouts` will have them.
            policy, continues: whether the trainer attaches its model, and whether that continues responses.
            rows: whether it trains on rows that the graph makes.

        Raises:
            ConfigError: the graph reads token ids, values, log-probs, entropies or a policy, which the trainer does not
                give, or makes rows that it does not take.
        """
        place = f"graph '{self.name}'"
        self._check_rows(rows)
        for node in self._running_nodes():
            where = f"{place}, node '{node.name}'"
            kinds = self._given_kinds(node)
            if Policy in kinds and self.policy is None and not (continues if self.samples else policy):
                raise ConfigError(needed(where, Policy))
            if Policy in kinds and self.policy is None and not self._reads_trained(node):
                raise ConfigError(
                    f"{where} asks another model than the one that is trained; name a server that has it by "
                    "--endpoint=URL."
                )
        if self._records and not tokens:
            raise ConfigError(f"{place}: {OPTION} writes token ids, but the trainer's hook passes none.")
        if self._reads_text() and not tokens:
            raise ConfigError(
                f"{place}: it reads texts, but the trainer's hook passes no token ids; see Rollouts.tokens."
            )
        if not logprobs and self.reads("logprobs"):
            raise ConfigError(
                f"{place}: it reads log-probs of the sampled tokens, but the trainer gives none; see Rollouts.logprobs."
            )
        if not entropies and self.reads("entropies"):
            raise ConfigError(
                f"{place}: it reads entropies, but the trainer gives none; see Rollouts.entropies. Segments can be "
                "those of segmenter.use=segmenter.fixed."
            )
        if not values and any(self._graph[w.source].use == CRITIC for w in self._wires()):
            raise ConfigError(f"{place}: it reads values, but the trainer gives none; see Rollouts.values.")

    def check_loss(self, taken: bool, how: str = "Its loss runs in TRL, verl and `creditgraph train`.") -> None:
        """Raises ConfigError where the trainer's own loss would leave out a setting, or the method.

        It would leave out the method of a graph that has a loss of its own and compares whole responses, as GRPO does.

        Args:
            taken: whether the loss is the graph's.
            how: a sentence on how it becomes that.
        """
        if taken:
            return
        place = f"graph '{self.name}'"
        for setting in self._settings:
            if setting.lstrip("+~").startswith("learner.objective"):
                raise ConfigError(f"{place}: {setting} has no effect here, where the loss is the trainer's. {how}")
        losses = [(x.use, x.config, x.entropy_mask, x.entropy_bonus) for x in (self.objective, ObjectiveSettings())]
        if [node.use for node in self._running_nodes()] == ["advantage.group"] and losses[0] != losses[1]:
            raise ConfigError(
                f"{place}: its advantages are those of GRPO, its method is its loss, but the loss is the trainer's. "
                f"{how}"
            )

    def refuse_images(self) -> None:
        """Raises ConfigError: prompts have images, and the model is asked about texts alone."""
        raise ConfigError(
            f"graph '{self.name}': it reads texts with the model, but the prompts have images. Choose a graph that "
            "reads rewards alone."
        )

    def _check_rows(self, makes: bool) -> None:
        place, own = f"graph '{self.name}'", ", ".join(node.use for node in self._samplers)
        if self.makes_rows and not (makes and self._samplers):
            raise ConfigError(
                f"{place}: it samples responses of its own ({own}), which this trainer does not have; expected one "
                "sampler of independent responses or episodes. Train it with CreditGRPOTrainer of "
                "creditgraph.adapters.trl, or with `creditgraph train`."
            )
        if not self.makes_rows:
            return
        if [n for n in self._running_nodes() if n.outputs_of(Environments) or n.use == INTERVENES]:
            raise ConfigError(
                f"{place}: it plays episodes of its own, or stops after a thought ({own}), which no other trainer "
                "does. Train it with `creditgraph train`."
            )
        self._check_texts()

    def _reads_trained(self, node: Node) -> bool:
        """Whether the policy that a node reads has the learner's weights."""
        engine = self._graph[node.wires["policy"][0].source]
        return [wire.source for wire in engine.wires.get("weights", [])] == [self._learner.name]

    def _running_nodes(self) -> list[Node]:
        return [self._graph[name] for name in self.nodes]

    def _sampling_nodes(self) -> list[Node]:
        return [node for node in self._running_nodes() if isinstance(node.config, SamplingSettings)]

    def _given_kinds(self, node: Node) -> set[type | None]:
        return given_kinds(self._graph, node, self.gives)

    def _wires(self) -> list[Wire]:
        return [wire for node in self._running_nodes() for wires in node.wires.values() for wire in wires]

    @property
    def _mode(self) -> str:
        """ "line" or "sentence": where thoughts end; "" if the graph says neither."""
        mode = next((getattr(node.config, "mode", "") for node in self._samplers), "")
        return mode if mode in ("line", "sentence") else ""

    @property
    def _split(self) -> str:
        """The mode, if a node reads the thoughts of a trainer's responses."""
        return self._mode if any(map(self._reads_thoughts, self._running_nodes())) else ""

    def _reads_thoughts(self, node: Node) -> bool:
        return node.use == THOUGHTS or "thoughts" in node.cls.needs_of(node.config)

    def _reads_text(self) -> bool:
        nodes = self._running_nodes()
        return any("policy" in n.wires or n.use in ("segmenter.keyword_entropy", THOUGHTS) for n in nodes)
