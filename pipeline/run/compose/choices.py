"""The folders and files that a configuration is composed of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from creditgraph.pipeline import ROOT
from creditgraph.pipeline.core.errors import ConfigError

CONFIG_DIR = ROOT / "configs"


def search_dirs(extra: Sequence[str | Path] = ()) -> list[Path]:
    """Returns the folders with groups and recipes: the shipped one, the user's ./configs, and --config-dir folders."""
    # The first folder wins, so that no file of a user replaces a shipped one of the same name.
    dirs = [CONFIG_DIR]
    here = Path.cwd() / "configs"
    for folder in [here, *(Path(e).expanduser().resolve() for e in extra)]:
        if folder.is_dir():
            if folder.resolve() not in [d.resolve() for d in dirs]:
                dirs.append(folder)
        elif folder != here:
            raise ConfigError(f"--config-dir: no folder '{folder}'; expected one that holds graph/ or recipe/ files.")
    return dirs


def list_choices(group: str, dirs: Sequence[Path]) -> dict[str, Path]:
    """Choice name → file of a config group ("recipe", "graph", "model", …)."""
    files: dict[str, Path] = {}
    for folder in dirs:
        for file in sorted((folder / group).glob("*.yaml")):
            files.setdefault(file.stem, file)
    return files


def list_groups(dirs: Sequence[Path]) -> set[str]:
    """Names of all config groups."""
    return {p.name for d in dirs for p in d.iterdir() if p.is_dir() and any(p.glob("*.yaml"))}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice, as hydra's does; YAML alone keeps the last one without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        scalars = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names: set[str] = set()
        for key in scalars:
            if key.value in names:
                raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {key.value}", key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


def load_yaml(text: str) -> Any:
    """The values of a text; raises yaml.YAMLError, also for a key that stands twice."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(file: Path) -> dict[str, Any]:
    """A YAML mapping, or a ConfigError with file and line."""
    try:
        values = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {_first_lines(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping, got {type(values).__name__}.")
    return values


def resolved_section(section: str, file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the file of a choice and resolves its references (`${…}`) in the configuration it is a section of.

    Raises:
        ConfigError: the file is no YAML mapping, or refers to a missing key.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    whole = OmegaConf.create({**values, section: read_yaml(file)})
    try:
        resolved: dict[str, Any] = OmegaConf.to_container(whole[section], resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {_first_lines(error)}") from error
    return resolved


def _first_lines(error: BaseException, limit: int = 6) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n  ".join(lines[:limit]) or type(error).__name__
