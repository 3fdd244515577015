"""verifiers and prime-rl: episodes with their traces, one per line of traces.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from creditgraph.adapters.imports.row import Format, Options, Part, Row, lines, said_by, text_of
from creditgraph.pipeline.core.errors import DataError

_STEP = re.compile(r"^step_(\d+)$")
# Of a node, one number per sampled token → field of a row.
_COMPACT = {
    "advantages": "advantage",
    "logprobs": "logprobs",
    "trainer_logprobs": "old_logprobs",
    "reference_logprobs": "reference_logprobs",
    "entropies": "entropies",
}


class Traces(Format):
    """The episodes of `verifiers` 0.4: its evaluations' traces.jsonl, and any program's that writes them as it does.

    A row is a branch of a trace's message graph: the messages before the first that the model sampled are the prompt.
    Episodes of one group, or without groups of one task, are compared.
    """

    name = "verifiers"
    source = "verifiers 0.4.0"
    patterns: ClassVar[tuple[str, ...]] = ("traces.jsonl", "**/traces.jsonl")
    patches = {
        "tokens": "evaluate with verifiers' training client (client.type=train), which records them",
        "advantage": "an evaluation has none; --graph grpo computes them",
    }

    def entries(self, file: Path) -> Iterator[tuple[str, Any]]:
        """The lines."""
        return lines(file)

    def rows(self, entry: Any, file: Path, options: Options) -> list[Row]:
        """The trained branches of an episode."""
        if "traces" not in entry:
            known = "a token export, which has neither rewards nor groups" if "token_ids" in entry else "no episode"
            raise DataError(
                f"{known}; expected the lines of traces.jsonl (of prime-rl: rollouts/step_N/train/effective)"
            )
        traces = [t for t in entry["traces"] if t["agent"].get("trainable", True)]
        if not traces:
            errors = [str(e.get("message")) for e in entry.get("errors") or ()]
            raise DataError(errors[-1] if errors else "the episode has no trace of an agent that is trained")
        step = ((entry.get("run") or {}).get("work") or {}).get("step")
        return [
            _branch(trace["nodes"], path, _group(entry), _step(file) if step is None else int(step), trace)
            for trace in traces
            for path in _paths(trace["nodes"])
        ]


class PrimeRL(Traces):
    """The episodes that prime-rl's file monitor writes: verifiers' records with group, step and advantages."""

    name = "prime-rl"
    source = "prime-rl at 559b4477, from its source; its records are those of verifiers 0.4.0, which writes them"
    patterns = ("**/train/effective/traces.jsonl", *Traces.patterns)
    patches = {
        "old_logprobs": "prime-rl's trainer keeps them in token exports, which have no rewards and no groups",
    }


def _step(file: Path) -> int | None:
    found = [int(match[1]) for part in file.parts if (match := _STEP.match(part))]
    return found[-1] if found else None


def _group(entry: Mapping[str, Any]) -> str:
    if entry.get("group"):
        return str(entry["group"]["id"])
    task = entry["task"]
    key = task.get("key") or task.get("hash") or task["data"].get("id") or task["data"].get("idx")
    return str(task["data"].get("prompt") if key is None else key)


def _paths(nodes: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """From root to leaf; an attempt to compact a context that nothing went on from is left out, as verifiers does."""
    inner = {node.get("parent") for node in nodes}
    links = [(link["type"], link["node"]) for node in nodes for link in node.get("semantic_parents") or ()]
    accepted = {node for kind, node in links if kind == "compaction"}
    paths = []
    for leaf in range(len(nodes)):
        kinds = {link["type"] for link in nodes[leaf].get("semantic_parents") or ()}
        if leaf in inner or ("compaction_attempt" in kinds and leaf not in accepted):
            continue
        path = [leaf]
        while (parent := nodes[path[-1]].get("parent")) is not None:
            if parent in path or not 0 <= parent < len(nodes):
                raise DataError(f"message {path[-1]} follows message {parent}; expected an earlier one of its trace")
            path.append(parent)
        paths.append(path[::-1])
    if not paths:
        raise DataError("a trace without a last message")
    return paths


def _branch(nodes: Sequence[Mapping[str, Any]], path: list[int], group: str, step: int | None, trace: Any) -> Row:
    messages = [nodes[i] for i in path]
    first = next((k for k, node in enumerate(messages) if node.get("sampled")), None)
    if first is None:
        raise DataError("the model sampled no message of it")
    rewards = [r for r in (trace.get("rewards") or {}).values() if r is not None]
    data = trace["task"]["data"]
    fields: dict[str, Any] = {}
    if any(node.get("token_ids") for node in messages):
        fields = _tokens(messages)
    return Row(
        step=step,
        group=group,
        prompt=[
            {"role": n["message"]["role"], "content": text_of(n["message"].get("content"))} for n in messages[:first]
        ],
        parts=[Part(said_by(n["message"]).text, bool(n.get("sampled"))) for n in messages[first:]],
        reward=sum(r["score"] * r.get("weight", 1.0) for r in rewards) if rewards else float("nan"),
        answer=str(data.get("answer") or ""),
        finish=str(trace.get("stop_condition") or ""),
        **fields,
    )


def _tokens(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ids, mask and numbers per token of a branch; the prompt ends where the first sampled token begins."""
    ids = [token for node in messages for token in node.get("token_ids") or ()]
    mask = [bool(flag) for node in messages for flag in node.get("mask") or ()]
    if len(mask) != len(ids) or True not in mask:
        raise DataError(f"{len(ids)} token ids with {len(mask)} entries in their masks, {sum(mask)} of them sampled")
    begin = mask.index(True)
    out: dict[str, Any] = {"prompt_ids": ids[:begin], "tokens": ids[begin:], "mask": mask[begin:]}
    for column, name in _COMPACT.items():
        spread: list[float | None] = []
        for node in messages:
            sampled = node.get("mask") or ()
            given = node.get(column) or ()
            if given and len(given) != sum(sampled):
                raise DataError(f"{len(given)} entries in {column}, but {sum(sampled)} sampled tokens in a message")
            numbers = iter(given)
            spread += [next(numbers, None) if flag else None for flag in sampled]
        if any(number is not None for number in spread):
            unknown = 0.0 if name == "advantage" else None
            out[name] = [unknown if number is None else number for number in spread[begin:]]
    return out
