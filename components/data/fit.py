"""Whether a data section, the verifier, the samplers and the model of a configuration fit each other; loads nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from creditgraph.components.data.sources import Source, read_source
from creditgraph.components.models.load import EMBEDDED, chat_template_at_hand, unknown_chat_settings
from creditgraph.components.tasks import TASKS
from creditgraph.components.text.templates import BY_THOUGHTS, PLACEHOLDER
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.handles import Environments, Verifier
from creditgraph.pipeline.core.payloads import Prompts, Trajectories
from creditgraph.pipeline.core.sockets import sockets_of

_READERS = {
    "value": "verifier.math",
    "choice": "verifier.choice",
    "boolean": "verifier.boolean",
    "code": "verifier.code",
    "steps": "verifier.steps",
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def data_misfits(
    split: str, node: Any, graph: Any, model: ModelSpec, data: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Sentences on what does not fit the entry that a node draws its problems from.

    Args:
        split: the entry of the data section.
        node: the node that draws them.
        graph: the graph; nodes that depend on `node` get its problems.
        model, data: sections of the configuration.
    """
    place = f"data.{split}"
    # A setup may set the template of an entry that the chosen data does not have.
    there = [name for name, entry in data.items() if set(entry) - {"template"}]
    if split not in there:
        known = f"has {', '.join(there)}" if there else "is empty"
        step = "choose data with problems to train on" if split == "train" else f"set {node.name}.split"
        return [f"node '{node.name}': split '{split}' is not in the data section, which {known}; {step}."]
    source, problems = read_source(data[split], place)
    if source is None:
        return problems
    sentences = model_misfits(source, model, place)
    if sentences:
        # Once is enough where the problems to train on are of the same kind.
        train, _ = read_source(data.get("train") or {}, "data.train")
        repeated = split != "train" and train is not None and model_misfits(train, model, "data.train")
        return [] if repeated else sentences
    takers = [other for other in graph.nodes if node.name in graph.ancestors([other.name])]
    names = {taker.name for taker in takers}
    for other in graph.nodes:
        # A verifier depends on no problem; the nodes that call it do.
        called = any(reader.name in names for reader, _, _ in graph.readers(other.name))
        if other.name in names or (called and other.outputs_of(Verifier)):
            sentences += kind_misfits(source, other, place)
    samplers = [taker for taker in takers if _solves(taker)]
    for taker in [node, *samplers]:
        sentences += mode_misfits(source, getattr(taker.config, "mode", ""), taker.name, place)
    for taker in takers:
        sentences += need_misfits(source, taker, samplers, graph)
    return sentences


def need_misfits(source: Source, taker: Any, samplers: Sequence[Any], graph: Any) -> list[str]:
    """Sentences on what a node needs of the responses or environments that its inputs come from, and they do not have.

    Args:
        source: the problems.
        taker: the node.
        samplers: nodes that sample solutions of these problems.
        graph: the graph.
    """
    above = graph.ancestors([taker.name])
    needs = taker.cls.needs_of(taker.config)
    sentences = []
    from_whole = [s.name for s in samplers if s.name in above and getattr(s.config, "mode", "") == "plain"]
    by_thoughts = [s.name for s in samplers if s.name in above and s.name not in from_whole]
    if "thoughts" in needs and from_whole and not by_thoughts and source.by_template not in BY_THOUGHTS:
        modes = " or ".join(f"{from_whole[0]}.mode={mode}" for mode in ("line", "sentence"))
        sentences.append(
            f"node '{taker.name}' ({taker.use}) reads where thoughts end, but '{from_whole[0]}' samples whole "
            f"responses; set {modes}, or {from_whole[0]}.mode=thought with a template that asks for </thought>."
        )
    if "states" in needs:
        made = [node for node in graph.nodes if node.name in above and node.outputs_of(Environments)]
        sentences += [
            f"node '{taker.name}' ({taker.use}) compares turns in the same state, but the environments of "
            f"'{node.name}' have no `state`; give them one (docs/turns.md), or take a method that needs none."
            for node in made
            if not node.cls.states_of(node.config)
        ]
    return sentences


def _solves(node: Any) -> bool:
    """Whether a node samples solutions of prompts; requests that follow a trajectory have words of their own."""
    inputs = sockets_of(node.cls).inputs
    return (
        bool(node.outputs_of(Trajectories))
        and any(socket.carries(Prompts) for socket in inputs.values())
        and not any(socket.carries(Trajectories) for socket in inputs.values())
    )


def kind_misfits(source: Source, node: Any, place: str) -> list[str]:
    """A sentence if a node reads reference answers of other kinds than the source has."""
    kinds = node.cls.references_of(node.config)
    verifies = bool(node.outputs_of(Verifier))
    if kinds is None or (source.kinds and source.kinds <= kinds) or not (source.kinds or verifies):
        return []
    reader = f"node '{node.name}' ({node.use})"
    if not source.kinds:
        return [f"{place}: it has no reference answers, but {reader} reads them; set {place}.answer=COLUMN."]
    found = "programs' tests" if source.kinds == {"code"} else f"of kind {' and '.join(sorted(source.kinds))}"
    step = "choose other data"
    if verifies:
        step = (
            f"set {node.name}.use={source.verifier or _READERS[source.answer_kind]} or {place}.answer_kind, or {step}"
        )
    return [f"{place}: its references are {found}, but {reader} reads {', '.join(sorted(kinds))}; {step}."]


def mode_misfits(source: Source, mode: str, name: str, place: str) -> list[str]:
    """A sentence if a node samples by thoughts from prompts that do not say what ends a thought.

    Plain prompts, and words of `user_prompt` around the problem, are the user's own and may say it.
    """
    words = source.user_prompt.strip() != PLACEHOLDER and source.user_prompt
    if mode != "thought" or words or source.system_prompt or source.by_template in (*BY_THOUGHTS, "plain"):
        return []
    own = f" {place}.user_prompt=''" if source.user_prompt else ""
    return [
        f"{place}: '{name}' samples thought by thought, but template '{source.by_template}' does not ask for "
        f"steps that end with </thought>; set {place}.template=thought{own}, or {name}.mode=line (each line of a "
        "response is a thought), sentence or plain."
    ]


def model_misfits(source: Source, model: ModelSpec, place: str) -> list[str]:
    """A sentence if the model cannot read the source's prompts."""
    words = next((name for name in (source.source, source.template) if name in TASKS), "")
    if model.path in EMBEDDED and (source.source == "hub" or source.template == "chat"):
        own = " or ".join(f"data={name}" for name, task in TASKS.items() if task.model == model.path)
        return [
            f"{place}: {source.place} is in words that the embedded model does not know; choose model=NAME, or {own}."
        ]
    named = _HUB_NAME.fullmatch(model.path) and not model.path.startswith((".", "~")) and not Path(model.path).is_dir()
    if words and TASKS[words].model != model.path and (named or model.path in EMBEDDED):
        return [
            f"{place}: task '{words}' is in the vocabulary of the embedded model {TASKS[words].model}, but the model "
            f"is {model.path}; choose other data, model={TASKS[words].model}, or a folder of a model that was trained "
            "on it."
        ]
    return []


def chat_misfits(model: ModelSpec) -> list[str]:
    """A sentence if the model's chat template is on this machine and does not know a setting for it."""
    template = chat_template_at_hand(model) if model.chat_template_kwargs else None
    unknown = unknown_chat_settings(model, template) if template else ""
    return [unknown] if unknown else []
