"""What creditgraph asks pip for, as pyproject.toml says it."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def wanted(extras: Iterable[str]) -> list[str]:
    """Requirements of the core and of these extras, with the extras that they include."""
    found, left = list(PROJECT["dependencies"]), list(extras)
    while left:
        for text in PROJECT["optional-dependencies"][left.pop()]:
            requirement = Requirement(text)
            if requirement.name == PROJECT["name"]:
                left += requirement.extras
            else:
                found.append(text)
    return sorted(set(found))
