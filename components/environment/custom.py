"""An environment of the user's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from creditgraph.components.environment.base import EnvironmentComponent
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.registry import load_own

METHODS = ("reset", "step", "close")


class Custom(EnvironmentComponent):
    """An environment of your own: a class with the methods reset, step and close, plain or async.

    Each episode gets a new object. It runs in this process: an environment that may take the process down belongs
    behind `environment.http`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The class and its arguments."""

        name: str = ""
        """module:Class, or path/to/file.py:Class from the working directory"""
        arguments: dict[str, Any] = field(default_factory=dict)
        """keyword arguments of the class"""

        def __post_init__(self) -> None:
            if self.name:
                check_class(load_own(self.name, "class"), self.name)

    config: Config

    @classmethod
    def states_of(cls, config: Any) -> bool:
        """Whether the source of the class has the word `state` at all."""
        if not config.name:
            return True
        bases = [base for base in load_own(config.name, "class").__mro__ if base is not object]
        try:
            return any(re.search(r"\bstate\b", inspect.getsource(base)) for base in bases)
        except (OSError, TypeError):  # no source
            return True

    @classmethod
    def lacks(cls, node: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """The class."""
        return [] if node.config.name else [_no_class(node.name)]

    def setup(self, context: Context) -> None:
        """Imports the class."""
        super().setup(context)
        if not self.config.name:
            raise ConfigError(_no_class(context.node))
        self._class = load_own(self.config.name, "class")

    def make(self) -> Any:
        """A new object of the class."""
        return self._class(**self.config.arguments)


def _no_class(node: str) -> str:
    return (
        f"node '{node}': no environment; set name to module:Class or path/to/file.py:Class, such as "
        f"{node}.name=mine.py:MyEnvironment."
    )


def check_class(cls: Any, name: str) -> None:
    """Raises ValueError unless it is a class with the three methods."""
    missing = [method for method in METHODS if not callable(getattr(cls, method, None))]
    if not inspect.isclass(cls) or missing:
        found = f"a class without {', '.join(missing)}" if inspect.isclass(cls) else f"{cls!r}"
        raise ValueError(f"class '{name}': expected a class with the methods {', '.join(METHODS)}, got {found}.")
