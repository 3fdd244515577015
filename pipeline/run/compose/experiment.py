"""From the command line's overrides to a checked experiment: hydra composes, this module checks.

A configuration has the reserved sections `run`, `model`, `data`, `nodes`, `recipe`. Every other top-level
section carries the name of a node and is merged over that node: `use` replaces its component, the rest are settings. So
``learner.optimizer.lr=1e-4`` and ``engine=vllm`` work on any graph.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from creditgraph.pipeline.core.errors import ConfigError, GraphError, did_you_mean, nearest
from creditgraph.pipeline.core.foreign import all_ours
from creditgraph.pipeline.core.registry import build_component
from creditgraph.pipeline.core.settings import place_settings
from creditgraph.pipeline.run.compose.checks import (
    check_aliases,
    check_last_word,
    chooses_component,
    composing_error,
    drop_replaced,
    joined,
    section_hint,
)
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices, read_yaml, search_dirs
from creditgraph.pipeline.run.compose.overrides import Override, deep_merge, hydra_overrides, parse_overrides, run_name
from creditgraph.pipeline.run.compose.secrets import from_environment, public, remember_sources
from creditgraph.pipeline.run.run_directory import check_run
from creditgraph.pipeline.run.trust import check_trusted

if TYPE_CHECKING:
    from creditgraph.pipeline.core.component import ModelSpec
    from creditgraph.pipeline.core.graph import Graph
    from creditgraph.pipeline.run.run_settings import RunSettings

logger = logging.getLogger("creditgraph")
RESERVED = ("run", "model", "data", "nodes", "recipe")
PRIMARY = "train"
GROUPS_IN_DEFAULTS = ("engine", "learner")  # `train.yaml` chooses one of each, also for a graph without such a node


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A checked configuration: everything needed to build an executor, and the plain dict it came from."""

    run: RunSettings
    model: ModelSpec
    data: dict[str, dict[str, Any]]
    graph: Graph
    resolved: dict[str, Any] = field(repr=False)

    @property
    def public(self) -> dict[str, Any]:
        """The configuration as it may be written down, see `creditgraph.pipeline.run.compose.secrets`."""
        settings: dict[str, Any] = public(self.resolved)
        return settings

    @property
    def run_path(self) -> Path:
        """The run directory."""
        return Path(self.run.root) / self.run.name

    @property
    def places(self) -> list[str]:
        """Dotted names of the nodes' settings that may change when the run is continued; see `place_settings`."""
        return [f"{n.name}.{setting}" for n in self.graph.nodes for setting in place_settings(n.cls.Config)]


def compose(overrides: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> dict[str, Any]:
    """Composes a plain resolved dict from overrides such as ["recipe=toy_srpo", "run.seed=1"].

    Raises:
        ConfigError: unknown group choice, override without '=', or a YAML file that does not compose.
    """
    dirs = search_dirs(config_dirs)
    parsed = parse_overrides(overrides, dirs)
    check_aliases(parsed, [d for d in dirs if d != CONFIG_DIR])
    values = _composed(parsed, dirs)
    check_last_word(values, parsed)
    kept = [o for o in parsed if not chooses_component(o.key, o.is_group, values.get("nodes"))]
    before = values if kept == parsed else _composed(kept, dirs)
    for note in drop_replaced(values, before, [o.key for o in kept]):
        logger.warning("%s", note)
    return finish(values, parsed)


def _composed(parsed: Sequence[Override], dirs: Sequence[Path]) -> dict[str, Any]:
    """What hydra makes of the files and overrides, with all references resolved."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            warnings.simplefilter("ignore")
            composed = hydra_compose(PRIMARY, hydra_overrides(parsed, dirs))
        values: dict[str, Any] = remember_sources(
            OmegaConf.to_container(composed, resolve=True), OmegaConf.to_container(composed, resolve=False)
        )
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        place = f"configuration {' '.join(o.text for o in parsed)}"
        raise ConfigError(f"{place}: {composing_error(error)}") from error
    return values


def finish(values: dict[str, Any], parsed: Sequence[Override]) -> dict[str, Any]:
    """Adds the recipe's name and, if run.name is not set, a name for the run."""
    for group in ("graph", "recipe", "setup"):
        if isinstance(values.get(group), dict):
            name = next((o.value for o in parsed if o.key == group), "NAME")
            raise ConfigError(
                f"{group}/{name}.yaml: its settings are below '{group}', not at the top of the configuration; make "
                "'# @package _global_' the first line of the file."
            )
    recipe = next((o.value for o in parsed if o.key == "recipe"), None)
    values["recipe"] = recipe
    run = values.setdefault("run", {})
    if isinstance(run, dict) and not run.get("name"):
        run["name"] = run_name(parsed, run.get("seed", 0))
    return values


def graph_dict(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the graph, with the sections named like nodes merged into it, and the problems of doing so."""
    nodes = values.get("nodes")
    if nodes is not None and not isinstance(nodes, dict):
        return {"nodes": {}}, [f"nodes: expected 'name: {{use: …}}' for each node, got {nodes!r}."]
    if not nodes:
        unknown = [s for s in values if s not in RESERVED and not _is_unused(s, values[s])]
        return {"nodes": {}}, [
            *(f"section '{s}': unknown.{did_you_mean(s, RESERVED)}" for s in unknown),
            "no graph: nothing defines 'nodes'; choose recipe=NAME or graph=NAME (see creditgraph graph --list).",
        ]
    problems: list[str] = []
    merged = {name: dict(spec) if isinstance(spec, dict) else spec for name, spec in nodes.items()}
    # A section named like a node holds settings of that node; learner.optimizer.lr=1e-4 creates such a section.
    for section, settings in values.items():
        if section in RESERVED:
            continue
        spec = merged.get(section)
        if spec is None and section in nodes:
            continue
        if section not in nodes:
            if not _is_unused(section, settings):
                hint = section_hint(section, settings, merged, RESERVED)
                problems.append(f"section '{section}': no such node in this graph.{hint}")
        elif not isinstance(settings, dict):
            problems.append(
                f"section '{section}': got {settings!r}; expected settings of the node, for example "
                f"{section}.setting=value."
            )
        elif isinstance(spec, dict):
            own = dict(settings)
            if "use" in own:
                spec["use"] = own.pop("use")
            if isinstance(spec.get("config") or {}, dict):  # otherwise the graph's check says what is wrong with it
                spec["config"] = deep_merge(spec.get("config") or {}, own)
    _use_verifier_of_data(merged, values)
    return {"nodes": merged}, problems


def _use_verifier_of_data(nodes: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Replaces the graph's verifier by that of the training data, where only the latter can read its answers.

    A section (verifier.use=…) has the last word.
    """
    section = values.get("verifier") or {}
    data = values.get("data")
    entry = data.get("train") if isinstance(data, dict) else None
    declared = values["nodes"].get("verifier")
    if not isinstance(section, dict) or not isinstance(entry, dict) or not isinstance(declared, dict):
        return
    if "use" in section or not entry.get("verifier") or not isinstance(declared.get("use"), str):
        return
    with suppress(ConfigError, KeyError):  # the checks of the graph name what is wrong with it
        component = build_component(declared["use"], declared.get("config") or {}, "verifier")
        kinds = component.references_of(component.config)
        if kinds is not None and entry.get("answer_kind", "value") not in kinds:
            nodes["verifier"] = {**declared, "use": entry["verifier"], "config": section}


def _is_unused(section: str, settings: Any) -> bool:
    """Whether a section is only the default choice of a group, which a graph without that node ignores."""
    return section in GROUPS_IN_DEFAULTS and isinstance(settings, dict) and set(settings) <= {"use"}


def settings_of_run(path: Path) -> dict[str, Any]:
    """The configuration of a run, with the variables of the environment that it names, to build its graph from.

    Raises:
        RunError: there is no run, or its code may not be loaded; see `creditgraph.pipeline.run.trust`.
        ConfigError: config.yaml is damaged, or a variable is not set.
    """
    check_run(path)
    config = path / "config.yaml"
    values = read_yaml(config)
    check_trusted(path, values)
    settings: dict[str, Any] = from_environment(values, str(config))
    return settings


def build_experiment(values: dict[str, Any], place: str = "configuration") -> Experiment:
    """Checks every section and the graph; all problems in one GraphError."""
    from creditgraph.pipeline.core.component import ModelSpec
    from creditgraph.pipeline.core.graph import build_graph
    from creditgraph.pipeline.core.settings import build_config
    from creditgraph.pipeline.run.compose.row_length import longest_row
    from creditgraph.pipeline.run.recorder import chosen_outputs
    from creditgraph.pipeline.run.run_settings import RunSettings

    values = _named(values) | {s: _named(values[s]) for s in ("nodes", "data") if isinstance(values.get(s), dict)}
    spec, problems = graph_dict(values)
    built: dict[str, Any] = {}
    for section, cls in (("run", RunSettings), ("model", ModelSpec)):
        built[section], sentences = build_config(cls, values.get(section) or {}, section)
        problems += sentences
    data = values.get("data") or {}
    if not isinstance(data, dict) or any(not isinstance(v, dict) for v in data.values()):
        hint = all_ours("data", data)
        problems.append(f"data: expected one mapping per split, such as data.train and data.eval, got {data!r}.{hint}")
    else:
        problems += [
            f"data.{name}: no source, and no split of that name in the files.{hint}"
            for name, entry in data.items()
            if "source" not in entry and (hint := nearest(name, [n for n, e in data.items() if "source" in e]))
        ]
    graph = None
    if spec["nodes"]:
        try:
            graph = build_graph(spec)
        except GraphError as error:
            problems += error.problems
    if graph is not None and built["run"] is not None:
        try:
            chosen_outputs(built["run"].record, graph)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise GraphError(joined(problems, spec["nodes"]), place)
    assert graph is not None
    for node in graph.nodes:
        try:
            problems += node.cls.misfits(node, graph, built["model"], data)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise GraphError(list(dict.fromkeys(problems)), place)
    built["model"] = built["model"].with_rows(longest_row(graph))
    return Experiment(**built, data=data, graph=graph, resolved=values)


def _named(section: Mapping[Any, Any]) -> dict[str, Any]:
    """A section with texts as names: YAML reads `on:` as true and `1:` as a number, and checks name what is unknown."""
    return {str(name): value for name, value in section.items()}


def check_shipped(dirs: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    """Checks every graph and recipe in `dirs`; yields (name, problems)."""
    from creditgraph.pipeline.core.graph import build_graph

    extra = [d for d in dirs if d != CONFIG_DIR]
    for name, file in list_choices("graph", dirs).items():
        try:
            build_graph(read_yaml(file))
            yield f"graph {name}", []
        except (ConfigError, GraphError) as error:
            yield f"graph {name}", getattr(error, "problems", [str(error)])
    recipes = list(list_choices("recipe", dirs))
    # Composing is hydra's pure Python, a tenth of a second each; the classes are imported by now, so forked children
    # start at once.
    with ProcessPoolExecutor(min(len(recipes) or 1, os.cpu_count() or 1), mp_context=get_context("fork")) as pool:
        yield from pool.map(partial(_check_recipe, extra), recipes)


def _check_recipe(config_dirs: list[Path], name: str) -> tuple[str, list[str]]:
    try:
        build_experiment(compose([f"recipe={name}"], config_dirs))
    except (ConfigError, GraphError) as error:
        return f"recipe {name}", getattr(error, "problems", [str(error)])
    return f"recipe {name}", []
