"""A plain reward function: finding it by name, and a worker process that calls it with JSON lines.

Request: {"number", "prompt", "response", "answer", "metadata"}. Reply: the number, and {"value": number}, {"returned":
text} for what is no number, or {"raised": text}. The first line out is {"ready": true}.
"""

import inspect
import json
import numbers
import os
import random
import signal
import sys
import zlib
from collections.abc import Callable
from typing import Any

from creditgraph.pipeline import ROOT
from creditgraph.pipeline.core.errors import raised_text
from creditgraph.pipeline.core.registry import load_own

ARGUMENTS = ("prompt", "response", "answer", "metadata")
_ORPHAN_SECONDS = 5.0  # after the limit, a worker whose run was killed during a call ends itself
# Isolated by -P: the folder of a script or of the run is not put before the standard library.
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[3])
from creditgraph.components.verifier.function_worker import main
main()
"""


def worker_command(name: str, seconds: float) -> list[str]:
    """The command of a worker that calls the function `name`, with this process's module path."""
    path = [*sys.path, str(ROOT.parent)]
    return [sys.executable, "-P", "-c", _START, name, str(seconds), json.dumps(path)]


def load_function(name: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The function that "module:name" or "path/to/file.py:name" names, and which of `ARGUMENTS` it takes.

    Raises:
        ValueError: there is no such function, or it cannot be called with some of `ARGUMENTS` by name.
    """
    function = load_own(name, "function")
    return function, _arguments(function, name)


def _arguments(function: Any, name: str) -> tuple[str, ...]:
    """Which of `ARGUMENTS` the function takes."""
    if not callable(function) or inspect.isclass(function):
        raise ValueError(f"function '{name}': expected a function, got {_shown(function)}.")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ValueError(f"function '{name}': expected a plain function, got one with async or yield.")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ValueError(f"function '{name}': its parameters are unknown; wrap it in a function of Python.") from None
    kinds = {p.kind for p in parameters.values()}
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in open_ended]
    taken = ARGUMENTS if inspect.Parameter.VAR_KEYWORD in kinds else tuple(a for a in ARGUMENTS if a in parameters)
    other = next((p for p in needed if p not in ARGUMENTS), None)
    if other is not None or not taken or inspect.Parameter.POSITIONAL_ONLY in kinds:
        found = f"the parameter '{other}'" if other else f"({', '.join(parameters)})"
        raise ValueError(
            f"function '{name}': expected the parameters prompt, response and answer (any of them, and metadata), got "
            f"{found}. Name them so, or wrap the function."
        )
    return taken


def main() -> None:
    """Serves requests until standard input ends."""
    # Requests and replies keep their own descriptors: what the function prints goes to standard error.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    function, arguments = load_function(sys.argv[1])
    seconds = float(sys.argv[2])
    _send(replies, {"ready": True})
    own = os.getpid()
    for line in requests:
        request = json.loads(line)
        number = request.pop("number")
        _seed(json.dumps(request))
        signal.setitimer(signal.ITIMER_REAL, seconds + _ORPHAN_SECONDS)
        reply = _call(function, {name: request[name] for name in arguments})
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != own:  # a copy that the function has made of this process, and that returned too
            os._exit(0)
        _send(replies, {"number": number, **reply})


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        value = function(**arguments)
        if hasattr(value, "item") and not isinstance(value, str):
            value = value.item()  # a number of numpy or torch
        if isinstance(value, numbers.Real):
            return {"value": float(value)}
    except OverflowError:
        return {"returned": "a number beyond the largest float"}
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"raised": raised_text(error)}
    return {"returned": _shown(value)}


def _seed(line: str) -> None:
    """Makes random draws a function of the request, whichever worker gets it."""
    random.seed(line)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(zlib.crc32(line.encode()))


def _shown(value: Any) -> str:
    try:
        return "None" if value is None else f"{repr(value)[:60]} ({type(value).__name__})"
    except Exception:  # of the function's own class
        return f"a {type(value).__name__}"


def _send(fd: int, reply: dict[str, Any]) -> None:
    os.write(fd, json.dumps(reply).encode() + b"\n")
