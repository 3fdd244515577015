"""Errors that a user can act on: each names the place, the expected and the actual value, and the next step."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path


class CreditgraphError(ValueError):
    """A mistake that the user can correct, as a sentence; the command line prints it without a traceback."""


class ConfigError(CreditgraphError):
    """A wrong setting, override, recipe or graph file."""


class MissingExtraError(ConfigError):
    """A package of an extra is not installed."""


class GraphError(CreditgraphError):
    """One or more wiring problems; `problems` holds each as its own sentence."""

    def __init__(self, problems: list[str], place: str = "graph") -> None:
        self.problems = problems
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__(f"{place}: {count}\n" + "\n".join(f"  {i}. {p}" for i, p in enumerate(problems, 1)))


class AlignmentError(CreditgraphError):
    """Two batches that must describe the same rows do not."""


class DataError(CreditgraphError):
    """A data file, dataset or model folder that cannot be used."""


class RunError(CreditgraphError):
    """A run directory that cannot be written, read or resumed."""


class LostError(RunError):
    """An external resource of the run is lost; the executor saves the finished iterations and ends."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the nearest known name, "" when none is near."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the nearest known name, or a list of the known ones.

    >>> did_you_mean("lernr", ["learner", "engine"])
    " Did you mean 'learner'?"
    """
    names = sorted(known)
    hint = nearest(name, names)
    if hint or not names:
        return hint
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f" Known: {shown}."


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as a short text.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


# Extra of pyproject.toml → the modules that its packages install and that only it installs.
EXTRAS = {
    "train": "transformers datasets huggingface_hub tokenizers math_verify rich rapidfuzz httpx regex",
    "vllm": "vllm accelerate",
    "sglang": "sglang",
    "megatron": "megatron mbridge einops psutil",
    "transformer-engine": "transformer_engine",
    "lora": "peft",
    "plots": "matplotlib vl_convert",
    "tensorboard": "tensorboard PIL",
    "wandb": "wandb",
    "openenv": "websockets",
    "verifiers": "verifiers aiohttp",
    "tasks": "reasoning_gym",
}


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
        MissingExtraError: a package is missing or cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise _missing(error, extra_of(error) or name, f"{use}: ", otherwise) from error


@contextmanager
def any_extra() -> Iterator[None]:
    """As `extra`, for whichever extra a missing package belongs to; other failed imports pass."""
    try:
        yield
    except ImportError as error:
        name = extra_of(error)
        if not name:
            raise
        raise _missing(error, name) from error


def _missing(error: ImportError, name: str, use: str = "", otherwise: str = "") -> MissingExtraError:
    rest = f", or {otherwise}" if otherwise else ""
    return MissingExtraError(
        f"{use}a package of the extra '{name}' cannot be imported ({error}). "
        f"Install it with: pip install 'creditgraph[{name}]'{rest}."
    )


def extra_of(error: ImportError) -> str:
    """The extra whose package is missing, "" if none is."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return next((name for name, packages in EXTRAS.items() if missing in packages.split()), "")


def not_installed(package: str, use: str, otherwise: str = "") -> list[str]:
    """A sentence with the extra to install (as `extra` gives it), unless the package is there; imports nothing."""
    try:
        with extra(package, use, otherwise):
            find_package(package)
    except MissingExtraError as error:
        return [str(error)]
    return []


def find_package(name: str) -> None:
    """Raises ImportError if a package is not installed; does not import it, which may take seconds."""
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def raised_text(error: BaseException) -> str:
    """What a user's own code raised, such as "KeyError: 'x', mine.py line 12"; of the deepest line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f", {Path(frames[-1].filename).name} line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}"[:300] + place
