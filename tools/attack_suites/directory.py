"""A run directory that somebody else made, whose config.yaml names code: every command that takes a run directory.

A command that only reads exits normally, one that has to load what the configuration names refuses in a sentence, and
neither runs the code. The copy of a run is such a directory too, although its configuration is that of a run made here.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from creditgraph.pipeline.app.cli import main

FOLDER = Path()
EVIL = """
from pathlib import Path
Path({mark!r}).touch()
def reward(response, answer): return 1.0
class Evil: pass
"""
SMALL = [
    "run.iterations=1",
    "run.record.every=1",
    "run.record.outputs=all",
    "run.checkpoint.every=1",
    "evaluator.every=0",
]


@dataclass(frozen=True)
class Trap:
    """What a configuration names.

    Attributes:
        name: of the trap.
        set: puts it into the configuration, given a file of code.
    """

    name: str
    set: Callable[[dict, Path], object]


def _node(config: dict, name: str, **settings: object) -> None:
    config["nodes"][name] = {**config["nodes"].get(name, {}), **settings}
    if "use" in settings:
        config.pop(name, None)


def _server(**process: object) -> Callable[[dict, Path], object]:
    return lambda config, _: config.__setitem__("engine", {"use": "engine.vllm", "servers": 1, "process": process})


def _function(config: dict, file: Path) -> None:
    _node(config, "verifier", use="verifier.function")
    config["verifier"] = {"function": f"{file}:reward"}


TRAPS = (
    Trap("verifier.function", _function),
    Trap("a verifier of a file", lambda config, file: _node(config, "verifier", use=f"{file}:Evil")),
    Trap("an advantage of a module", lambda config, file: _node(config, "advantage", use=f"{file.stem}:Evil")),
    Trap("an objective", lambda config, file: config["learner"].update(objective={"use": f"{file.stem}:Evil"})),
    Trap("an engine's Python", _server(python="./evil_of_somebody.py")),
    Trap("a server's environment", _server(environment={"PYTHONSTARTUP": "evil_of_somebody.py"})),
    Trap("code of a model", lambda config, _: config["model"].update(trust_remote_code=True)),
    Trap("a variable of the reader's", lambda config, _: config["verifier"].update(url="http://a/${oc.env:HOME}")),
)
# Exit code 0: it reads; 2: it must load, so it refuses.
COMMANDS = {
    "report": (0, ["report", "{run}", "-o", "{out}/r.html"]),
    "status": (0, ["status", "{run}"]),
    "audit": (0, ["audit", "{run}"]),
    "credit": (2, ["credit", "recipe=toy_grpo", "{run}"]),
    "replay": (2, ["replay", "{run}", "--iteration", "0", "--node", "advantage"]),
    "eval": (2, ["eval", "run={run}", "suite=toy"]),
    "creditbench": (2, ["creditbench", "--methods", "grpo", "--run", "{run}", "--quick", "--output", "{out}/bench"]),
}


@dataclass(frozen=True)
class Case:
    """A command on a directory with a trap."""

    trap: Trap
    command: str

    def __str__(self) -> str:
        return f"{self.command}: {self.trap.name}"


def use(folder: Path) -> None:
    """Names the folder of all runs."""
    global FOLDER
    FOLDER = folder
    made.cache_clear()


def cases() -> list[Case]:
    """Every command with every trap; `export` reads the model alone."""
    export = [Case(trap, "export") for trap in TRAPS if trap.name == "code of a model"]
    return [Case(trap, command) for trap in TRAPS for command in COMMANDS] + export


def quick() -> list[Case]:
    return [Case(TRAPS[i % len(TRAPS)], command) for i, command in enumerate(COMMANDS)] + cases()[-1:]


@cache
def made() -> Path:
    """A run of one iteration."""
    path = FOLDER / "made"
    with _quiet():
        code = main(["train", "recipe=toy_grpo", f"run.root={FOLDER}", "run.name=made", *SMALL])
    assert code == 0
    return path


def run(case: Case) -> tuple[bool, str]:
    """Carries one out."""
    folder = FOLDER / str(case).replace(" ", "-").replace(":", "")
    shutil.copytree(made(), folder / "run")
    mark = folder / "EXECUTED"
    evil = folder / "run" / "evil_of_somebody.py"
    evil.write_text(EVIL.format(mark=str(mark)))
    file = folder / "run" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    for section in ("learner", "model", "verifier"):
        config.setdefault(section, {})
    case.trap.set(config, evil)
    file.write_text(yaml.safe_dump(config))
    arguments = ["export", "{run}", "--output", "{out}/model"]
    expected, arguments = (2, arguments) if case.command == "export" else COMMANDS[case.command]
    before = os.getcwd()
    os.chdir(folder / "run")  # where a module of that directory could be imported
    try:
        with _quiet() as said:
            code = main([part.format(run=folder / "run", out=folder) for part in arguments])
    except SystemExit as end:
        code = end.code
    finally:
        os.chdir(before)
    text = " ".join(said.getvalue().split())
    if mark.exists():
        return False, "the code was executed"
    if code != expected:
        return False, f"exit code {code}, expected {expected}: {text[-300:]}"
    if expected == 2 and "add --trust" not in text:
        return False, f"refused for another reason: {text[-300:]}"
    return True, text[-200:]


@contextlib.contextmanager
def _quiet():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        yield said
