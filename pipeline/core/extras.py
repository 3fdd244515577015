"""Packages that only some uses need: the extras of pyproject.toml, offered by name where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from pipeline.core.errors import ConfigError


@contextmanager
def extra(name: str, use: str, otherwise: str = "") -> Iterator[None]:
    """Inside, an import that fails becomes one sentence with the command that installs the extra.

        with extra("plots", "report"):
            import vl_convert

    Args:
        name: extra of pyproject.toml.
        use: what needs it: a setting or a command.
        otherwise: what to do without it, such as "set run.wandb.mode=disabled".

    Raises:
        ConfigError: a package is missing or cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        rest = f", or {otherwise}" if otherwise else ""
        raise ConfigError(
            f"{use}: a package of the extra '{name}' cannot be imported ({error}). "
            f"Install it with: pip install 'creditgraph[{name}]'{rest}."
        ) from error


def find_package(name: str) -> None:
    """Raises ImportError if a package is not installed; does not import it, which may take seconds."""
    if find_spec(name) is None:
        raise ImportError(f"No module named '{name}'")
