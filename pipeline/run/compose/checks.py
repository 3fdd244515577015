"""What composing checks beside hydra: settings of replaced components, unknown sections, YAML that expands."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.foreign import all_ours
from creditgraph.pipeline.core.registry import load_class
from creditgraph.pipeline.core.settings import settings_named
from creditgraph.pipeline.run.compose.overrides import Override

MAX_VALUES = 100_000  # values of a YAML file after its aliases are followed
_NAME = re.compile(r"[\w.-]+")
_ALIAS = re.compile(r"[\s\[{,:-]\*\w")


def chooses_component(key: str, is_group: bool, nodes: Any) -> bool:
    """Whether an override chooses a component: "learner.use", "nodes.learner.use", or the group of that name.

    So does one that chooses a part of a component, such as "learner.objective.use".
    """
    parts = key.removeprefix("nodes.").split(".")
    if not isinstance(nodes, Mapping) or parts[0] not in nodes:
        return False
    return parts[-1] == "use" or (is_group and len(parts) == 1)


def drop_replaced(values: dict[str, Any], before: Mapping[str, Any], given: Sequence[str]) -> list[str]:
    """Removes settings that the files hold for a replaced component and that the new one does not have.

    Settings that both have stay, so that `learner=megatron` keeps the objective of the graph.

    Args:
        values: the composed configuration; changed in place.
        before: the same without the overrides that choose components; the settings in it are those of the files.
        given: keys of the command line's overrides, whose settings stay even where they are wrong.

    Returns:
        A sentence per node that lost settings.
    """
    notes = []
    nodes = values.get("nodes")
    for name, spec in nodes.items() if isinstance(nodes, dict) else ():
        if not isinstance(spec, dict):
            continue
        section = values.get(name)
        use = _mapping(section).get("use", spec.get("use"))
        dropped: dict[str, Any] = {}
        replaced = ""
        for old, setting, value in list(_settings_of_files(name, before)):  # `before` may be `values`
            places = (f"{name}.{setting}", f"nodes.{name}.config.{setting}")
            if old == use or any(key == p or key.startswith(f"{p}.") for key in given for p in places):
                continue
            if setting in _fields(old) and setting not in _fields(use, default=(setting,)):
                for holder in (section, spec.get("config")):
                    if isinstance(holder, dict):
                        holder.pop(setting, None)
                dropped[setting] = value
                replaced = old
        if dropped:
            notes.append(_note(f"{name}.use", use, dropped, replaced))
        notes += _drop_parts(name, use, (section, spec.get("config")), before, given)
    return notes


def _note(place: str, use: str, dropped: Mapping[str, Any], replaced: str) -> str:
    listed = ", ".join(f"{setting}={_short(value)}" for setting, value in dropped.items())
    plural = "s" if len(dropped) > 1 else ""
    return f"{place}={use}: dropped {listed}, set by files for {replaced}; {use} has no such setting{plural}."


def _drop_parts(
    name: str, use: Any, holders: Sequence[Any], before: Mapping[str, Any], given: Sequence[str]
) -> Iterator[str]:
    """The same for a node's parts with a choice of their own, {use, config}, such as a learner's objective."""
    section, spec = holders
    of_files = (_mapping(before.get(name)), _mapping(_mapping(_mapping(before.get("nodes")).get(name)).get("config")))
    for part, choices in _parts(use).items():
        uses = [_mapping(_mapping(holder).get(part)).get("use") for holder in (section, spec)]
        chosen = str(uses[0] or uses[1])
        known = _fields(choices.get(chosen, chosen), default=("*",))
        declared = _mapping(of_files[1].get(part)).get("use")
        # Settings of a section were written for the section's own choice, or for that of the graph.
        olds = (_mapping(of_files[0].get(part)).get("use") or declared, declared)
        for holder, old in zip((section, spec), olds, strict=True):
            config = _mapping(_mapping(holder).get(part)).get("config")
            if old in (None, chosen) or known == ("*",) or not isinstance(config, dict):
                continue
            typed = tuple(f"{name}.{part}.config.{setting}" for setting in config)
            kept = {t for t in typed if any(key == t or key.startswith(f"{t}.") for key in given)}
            wrong = [s for s, t in zip(list(config), typed, strict=True) if s not in known and t not in kept]
            if wrong:
                yield _note(f"{name}.{part}.use", chosen, {setting: config.pop(setting) for setting in wrong}, old)


def _parts(use: Any) -> Mapping[str, Mapping[str, str]]:
    """Settings of a component that choose a class by name → its choices, from `choices` of the setting's class."""
    try:
        config = load_class(use).Config
        hints = get_type_hints(config)
    except Exception:  # reported by the graph's check
        return {}
    return {name: hint.choices for name, hint in hints.items() if isinstance(getattr(hint, "choices", None), dict)}


def _settings_of_files(name: str, before: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(component it was written for, setting, value): those in the graph's file, then those in the node's section."""
    spec = _mapping(_mapping(before.get("nodes")).get(name))
    section = _mapping(before.get(name))
    for setting, value in _mapping(spec.get("config")).items():
        yield str(spec.get("use")), setting, value
    for setting, value in section.items():
        if setting != "use":
            yield str(section.get("use", spec.get("use"))), setting, value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _fields(use: Any, default: Sequence[str] = ()) -> Sequence[str]:
    """Names of a component's settings; `default` for one that cannot be read, which the graph's check will report."""
    try:
        return [f.name for f in dataclasses.fields(load_class(use).Config)]
    except Exception:  # a module from outside may fail in any way
        return default


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def check_last_word(values: Mapping[str, Any], given: Iterable[Override]) -> None:
    """Raises ConfigError for an override below `nodes` that has no effect, because the node's section differs."""
    for override in given:
        root, _, rest = override.key.partition(".")
        name, _, rest = rest.partition(".")
        part, _, setting = rest.partition(".")
        if root != "nodes" or override.text.startswith("~") or part not in ("use", "config"):
            continue
        path = ["use"] if part == "use" else [s for s in setting.split(".") if s]
        section: Any = values.get(name)
        composed: Any = _mapping(_mapping(values.get("nodes")).get(name)).get(part)
        for key in path:
            section = _mapping(section).get(key)
            composed = _mapping(composed).get(key) if part == "config" else composed
        try:
            written = yaml.safe_load(override.value)
        except yaml.YAMLError:
            written = override.value
        if (path or isinstance(written, Mapping)) and _overruled(written, composed, section):
            short = ".".join([name, *path])
            raise ConfigError(
                f"override '{override.text}': no effect, because the section '{name}' has the last word: {short}="
                f"{_short(section)}. Expected an override of that; write {short}={override.value}."
            )


def _overruled(given: Any, composed: Any, section: Any) -> bool:
    """Whether a value that was given differs from the section's, where that has one."""
    if isinstance(given, Mapping) and isinstance(section, Mapping):
        return any(_overruled(given[k], _mapping(composed).get(k), section[k]) for k in given if k in section)
    return section is not None and composed != section


def section_hint(section: str, settings: Any, nodes: Mapping[str, Any], reserved: Iterable[str]) -> str:
    """The nearest section; for a bare setting such as `lr=1e-4`, the places where nodes have a setting of that name."""
    places = []
    for name, spec in () if isinstance(settings, dict) else nodes.items():
        try:
            places += [f"{name}.{setting}" for setting in settings_named(load_class(spec["use"]).Config, section)]
        except Exception:  # reported by the graph's check
            continue
    if places:
        return f" Did you mean {' or '.join(places[:3])}?"
    return all_ours(section, settings) or did_you_mean(section, [*nodes, *reserved])


def joined(problems: Iterable[str], nodes: Mapping[str, Any]) -> list[str]:
    """Problems in their order, where several nodes have the same one as one sentence: a recipe ties their settings.

    >>> joined(["a.x: expected 1.", "b: no wire.", "c.x: expected 1."], {"a": {}, "b": {}, "c": {}})
    ['a.x, c.x: expected 1.', 'b: no wire.']
    """
    places: dict[tuple[str, str], dict[str, None]] = {}  # ordered sets
    for problem in problems:
        place, colon, rest = problem.partition(":")
        node, dot, setting = place.partition(".")
        if colon and node in nodes:
            places.setdefault((dot + setting, colon + rest), {})[place] = None
        else:
            places.setdefault(("", problem), {})[""] = None
    return [f"{', '.join(names)}{sentence}" for (_, sentence), names in places.items()]


def check_aliases(parsed: Sequence[Override], folders: Iterable[Path]) -> None:
    """Raises ConfigError for a file of the user's whose YAML aliases (`*name`) repeat each other without measure.

    Only files that overrides choose, or the `defaults` of such a file, are looked at: one that is broken spoils no
    other.
    """
    files = {file for folder in folders for file in folder.glob("*/*.yaml")}
    chosen = " ".join(override.text for override in parsed)
    while loaded := {file for file in files if file.stem in _NAME.findall(chosen) or "${" in chosen}:
        files -= loaded
        for file in loaded:
            try:
                text = file.read_text(encoding="utf-8")
                root = yaml.compose(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
                continue  # hydra says what is wrong with it
            if _ALIAS.search(text) and (count := _count_values(root, {})) > MAX_VALUES:
                shown = "without end" if count == math.inf else f"to {count:.3g} values"
                raise ConfigError(f"{file}: its aliases (*name) expand {shown}; expected at most {MAX_VALUES:,}.")
            for key, value in root.value if isinstance(root, yaml.MappingNode) else []:
                if key.value == "defaults":
                    chosen += text[value.start_mark.index : value.end_mark.index]


def _count_values(node: yaml.Node, known: dict[int, float]) -> float:
    if id(node) not in known:
        known[id(node)] = math.inf  # of a node within itself
        below = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [child for item in below for child in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_count_values(child, known) for child in children)
    return known[id(node)]


def composing_error(error: BaseException) -> str:
    """One sentence for an error of hydra, OmegaConf or YAML."""
    text = str(error)
    if isinstance(error, RecursionError) or "recursion depth" in text:
        return (
            "nested without end; expected files that do not include themselves, and settings that are nested less "
            "deeply. Look at the 'defaults' of the recipe."
        )
    if "--multirun" in text:
        return "several values for one setting; expected one value, [a,b] for a list, or -m for a run per value."
    override = getattr(error, "override", None)
    if override is not None:
        return f"'{override.lstrip('+')}' cannot be read; close its quotes and brackets, or quote the whole value."
    if text.startswith("Could not delete"):
        return f"{text.rstrip('.')}; ~nodes.NAME removes a node, ~NAME its settings."
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: no YAML: {error.problem}."
    key = getattr(error, "full_key", None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (f"{key}: " if key else "") + (lines[0] if lines else type(error).__name__)
