"""Command-line overrides: how they are read, written in hydra's grammar, and how they name a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml

from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices, list_groups
from creditgraph.pipeline.run.compose.secrets import MASK, public

_UNQUOTED = re.compile(r"[A-Za-z0-9_ /\-\\+.$%*@?|:]*")  # values that hydra accepts without quotes
_KEY = re.compile(r"[\w$-]+([/.@:][\w$-]+)*")
# Of names made for runs: endings of files that say nothing, and characters of a value and of the whole.
_SUFFIX = re.compile(r"\.(jsonl?|csv|parquet|arrow)(\.gz|\.zst)?$")
_VALUE_LENGTH = 30
_NAME_LENGTH = 120
MAX_KEY = 200  # characters of a dotted name


@dataclass(frozen=True)
class Override:
    """One command-line override, parsed."""

    text: str
    key: str
    value: str
    is_group: bool


def parse_overrides(overrides: Sequence[str], dirs: Sequence[Path]) -> list[Override]:
    """Splits overrides into group choices and settings; all mistakes in one ConfigError."""
    groups = list_groups(dirs)
    problems = []
    parsed = []
    for text in overrides:
        bare = text.lstrip("+~")
        key, equals, value = bare.partition("=")
        if len(key) > MAX_KEY:
            problems.append(f"override '{text[:40]}…': a name of {len(key)} characters; expected at most {MAX_KEY}.")
            continue
        if not _KEY.fullmatch(key):
            problems.append(
                f"override '{text}': '{key}' is no name; expected names with dots between, as in run.seed=1."
            )
            continue
        group = key.partition("@")[0]
        if not equals and not text.startswith("~"):
            problems.append(f"override '{text}': no '='; expected key=value, such as run.seed=1 or recipe=toy_srpo.")
            continue
        is_group = group in groups and "." not in key
        if is_group and value.startswith("[") and value != "[]":
            problems.append(
                f"override '{text}': a list; expected one choice of {group}, or -m {group}=A,B for a run of each."
            )
        elif is_group:
            known = list_choices(group, dirs)
            problems += [
                f"override '{text}': no {group} named '{choice}'."
                f"{_as_path(group, choice) or did_you_mean(choice, known)}"
                for choice in ([] if text.startswith("~") else value.split(","))
                if choice not in (*known, "null", "[]")
            ]
        parsed.append(Override(text, key, value, is_group))
    for group in dict.fromkeys(item.key for item in parsed if item.is_group):
        given = [item.text for item in parsed if item.key == group]
        if len(given) > 1:
            problems.append(
                f"{' '.join(given)}: {len(given)} choices of one {group}; expected one. Leave the others out."
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return parsed


def _as_path(group: str, choice: str) -> str:
    """How a path or a name on the hub, given in place of a file of a group, is written."""
    setting = {"model": "model.path", "data": "data=file data.train.path"}.get(group)
    looks = "/" in choice or choice.startswith((".", "~")) or Path(choice).exists()
    return f" A file or folder of yours is written {setting}={choice}." if setting and looks else ""


def hydra_overrides(parsed: Sequence[Override], dirs: Sequence[Path]) -> list[str]:
    """Returns the overrides in hydra's grammar; settings may be new keys, because a `Config` checks them later."""
    out = []
    has_recipe = any(item.key == "recipe" for item in parsed)
    for item in parsed:
        adds = item.key == "setup" or (item.key == "graph" and not has_recipe)
        if adds and not item.text.startswith(("+", "~")):
            out.append(f"+{item.text}")  # nothing in the defaults names a graph or setup that could be replaced
        elif item.is_group or item.text.startswith(("+", "~", "hydra.")):
            out.append(item.text)
        else:
            # "++" adds or replaces the key: the component, not the file, determines which settings exist.
            out.append(f"++{item.key}={_quoted(item.value)}")
    paths = [_in_quotes(f"file://{d}") for d in dirs if d != CONFIG_DIR]
    return out + ([f"hydra.searchpath=[{','.join(paths)}]"] if paths else [])


def _quoted(value: str) -> str:
    """Returns the value in hydra's grammar; text with reserved characters, such as "=", gets quotes."""
    if _UNQUOTED.fullmatch(value) or value[0] in "'\"[{(" or "," in value or "${" in value or re.match(r"\w+\(", value):
        return value
    return _in_quotes(value)


def _in_quotes(value: str) -> str:
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", value)) + "'"


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Turns ["optimizer.lr=1e-4", "split=2x4"] into nested settings; values are YAML.

    >>> parse_settings(["a.b=1", "a.c=x"])
    {'a': {'b': 1, 'c': 'x'}}
    """
    settings: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"-s {text}: no '='; expected setting=value, for example -s normalize=mean.")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"-s {text}: the value is not YAML ({str(error).splitlines()[0]}); quote it.") from error
        for part in reversed(key.split(".")):
            parsed = {part: parsed}
        settings = deep_merge(settings, parsed)
    return settings


def deep_merge(base: Any, over: Any) -> Any:
    """`over` merged into `base`; mappings merge key by key, anything else replaces.

    >>> deep_merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}})
    {'a': {'x': 1, 'y': 3}}
    """
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{k: deep_merge(base.get(k), v) for k, v in over.items()}}
    return over


def run_name(parsed: Sequence[Override], seed: Any) -> str:
    """A name for the run of these overrides: recipe or graph, what was changed, seed.

    Paths are named by their last part, functions by their name. A name that had to be cut ends with a digest of all
    overrides, so that two runs do not share a folder.
    """
    parsed = [item for item in parsed if item.key.partition(".")[0] not in ("run", "hydra")]
    chosen = {item.key: item.value for item in parsed}
    base = "recipe" if chosen.get("recipe") else "graph"
    parts = [chosen.get(base) or "run"]
    cut = False
    for item in parsed:
        key = item.key.rpartition(".")[2]
        if item.key in (base, "recipe"):
            continue
        value = MASK if key == "headers" else str(public({key: item.value})[key])
        value = value if " " in value else value.rstrip("/").rpartition("/")[2]
        if key in ("path", "function"):
            value = _SUFFIX.sub("", value.rpartition(":")[2])
        cut = cut or len(value) > _VALUE_LENGTH
        named_by_value = key in ("path", "function", "graph", "model", "data")
        parts.append(value[:_VALUE_LENGTH] if named_by_value else f"{key}={value[:_VALUE_LENGTH]}")
    name = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", "-".join(parts))
    if cut or len(name) > _NAME_LENGTH:
        digest = blake2b(" ".join(item.text for item in parsed).encode(), digest_size=3).hexdigest()
        name = f"{name[:_NAME_LENGTH]}-{digest}"
    return f"{name}-s{seed}"
