"""Secrets in settings: `${oc.env:NAME}` is written down as it stands, what else looks like one as ***."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from creditgraph.pipeline.core.errors import ConfigError

logger = logging.getLogger("creditgraph")
MASK = "***"
_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,([^}]*))?\}")
_WORDS = {"authorization", "cookie", "credential", "credentials", "password", "passwd", "secret", "secrets", "token"}
_USER = re.compile(r"://[^/@\s]+@")


class FromEnvironment(str):
    """A setting that environment variables are part of; `source` is the text that names them."""

    source: str

    def __new__(cls, value: str, source: str) -> FromEnvironment:
        """The text, and its source."""
        made = super().__new__(cls, value)
        made.source = source
        return made


def remember_sources(resolved: Any, unresolved: Any) -> Any:
    """The resolved settings, with each text that has `${oc.env:…}` in the unresolved ones as `FromEnvironment`."""
    if isinstance(resolved, dict) and isinstance(unresolved, dict):
        return {key: remember_sources(value, unresolved.get(key)) for key, value in resolved.items()}
    if isinstance(resolved, list) and isinstance(unresolved, list):
        return [remember_sources(*pair) for pair in zip(resolved, unresolved, strict=True)]
    if isinstance(unresolved, str) and isinstance(resolved, str) and "${oc.env:" in unresolved:
        return FromEnvironment(resolved, unresolved)
    return resolved


def public(settings: Any) -> Any:
    """What may be written down: variables by name, other secrets masked; a copy."""
    return _changed(settings, "", _hidden)


def _hidden(key: str, value: Any) -> Any:
    if isinstance(value, FromEnvironment):
        return value.source
    if not isinstance(value, str) or "${" in value:
        return value
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
    named = _WORDS.intersection(words) or {"api", "key"} <= set(words) or "apikey" in words
    return MASK if named and value else _USER.sub(f"://{MASK}@", value)


def from_environment(settings: Mapping[str, Any], place: str) -> Any:
    """Settings that were written down, with the variables' values; warns of secrets that are masked.

    Raises:
        ConfigError: a variable is not set.
    """
    masked: list[str] = []

    def value_of(key: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if MASK in value and "${" not in value:
            masked.append(key)

        def variable(found: re.Match[str]) -> str:
            name, default = found.groups()
            if name not in os.environ and default is None:
                raise ConfigError(f"{place}: '{key}' needs the environment variable {name}; set it.")
            return os.environ.get(name, (default or "").strip())

        filled = _ENVIRONMENT.sub(variable, value)
        return FromEnvironment(filled, value) if filled != value else value

    filled = _changed(settings, "", value_of)
    if masked:
        logger.warning(
            "%s: secrets are masked there (%s), so what needs them fails; train with ${oc.env:NAME} in their place.",
            place,
            ", ".join(sorted(set(masked))),
        )
    return filled


def _changed(value: Any, key: str, change: Callable[[str, Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _changed(part, str(name), change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(part, key, change) for part in value]
    return change(key, value)
