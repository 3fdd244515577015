"""What the numbers of a run mean: every logged name with its unit and definition.

Names of components are in `components/metric_names.py`, each below its component; here are those of the executor, and
the search. `tools/update_docs` makes the tables of docs/metrics.md of both; the tests fail on a name that is logged
without a definition, and on a definition that nothing logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Metric:
    """One definition.

    Attributes:
        name: as in metrics.jsonl for the executor's, after "node/" for a component's; <part> stands for what varies.
        unit: of the number, such as "tokens", "s", "share" (0 to 1), "nats".
        text: the definition, one sentence.

    >>> Metric("pass_at_<k>", "share", "").fits("pass_at_8")
    True
    """

    name: str
    unit: str
    text: str

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        literal = re.split(r"<\w+>", self.name)
        return re.compile(".+".join(re.escape(part) for part in literal))

    def fits(self, name: str) -> bool:
        """Whether a logged name is this one."""
        return self._pattern.fullmatch(name) is not None


Definitions = Mapping[str, tuple[Metric, ...]]  # registered component → what it logs

EXECUTOR = (
    Metric("iteration", "number", "the iteration, from 0; the final pass has the number of iterations"),
    Metric("seconds/<node>", "s", "wall time of the node's `run`; of several replicas the longest"),
    Metric("seconds/iteration", "s", "wall time since the iteration before was logged"),
    Metric("seconds/cpu", "s", "processor time of this process, all threads, in `seconds/iteration`; no phase of it"),
    Metric(
        "seconds/executor",
        "s",
        "wall time of the executor between nodes, and of writing the metrics of the iteration before",
    ),
    Metric("seconds/checkpoint", "s", "wall time of the checkpoint that the iteration before made"),
    Metric("seconds/waiting_<lane>", "s", "wall time in which a lane (generation, learning) waited for the other one"),
    Metric(
        "utilisation/engine",
        "share",
        "time since the iteration before in which the engine took weights, generated or scored",
    ),
    Metric("utilisation/learner", "share", "time in which the learner ran"),
    Metric("utilisation/credit", "share", "time in which verifiers, rewards and credit nodes ran"),
    Metric("utilisation/waiting", "share", "time in which the main lane waited for the other lane or for other ranks"),
    Metric(
        "rejected/<node>", "rows", "rows the node skipped in this iteration; rejected.jsonl has each with its reason"
    ),
)


def definition(name: str, components: Definitions, nodes: Mapping[str, str]) -> Metric | None:
    """The definition of a logged name, None when it has none.

    Args:
        name: such as "sampler/cut_share".
        components: definitions per registered component.
        nodes: node → its `use`. Those of components outside the registry document their own metrics.
    """
    node, _, rest = name.partition("/")
    if node in nodes and rest:
        return _first(components.get(nodes[node], ()), rest)
    return _first(EXECUTOR, name)


def undocumented(names: Iterable[str], components: Definitions, nodes: Mapping[str, str]) -> list[str]:
    """Those of some logged names that have no definition, sorted; names of unregistered components are left out."""
    own = {node for node, use in nodes.items() if use not in components}
    return sorted(n for n in names if n.partition("/")[0] not in own and definition(n, components, nodes) is None)


def tables(components: Definitions) -> str:
    """Markdown: one table for the executor, one per component; components that log the same share one."""
    parts = [_table("Executor", "name", EXECUTOR)]
    same: dict[tuple[Metric, ...], list[str]] = {}
    for use, metrics in components.items():
        same.setdefault(metrics, []).append(use)
    silent = same.pop((), [])
    parts += [_table(", ".join(f"`{u}`" for u in uses), "node/…", metrics) for metrics, uses in same.items()]
    parts.append(f"## Components that log nothing\n\n{', '.join(f'`{u}`' for u in silent)}.")
    return "\n\n".join(parts)


def _first(metrics: Iterable[Metric], name: str) -> Metric | None:
    exact = [m for m in metrics if m.name == name]
    return next(iter(exact or [m for m in metrics if m.fits(name)]), None)


def _table(title: str, head: str, metrics: Iterable[Metric]) -> str:
    rows = [f"| `{m.name}` | {m.unit} | {m.text.replace('|', '&#124;')} |" for m in metrics]
    return "\n".join([f"## {title}", "", f"| {head} | unit | definition |", "|---|---|---|", *rows])
