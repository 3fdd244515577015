"""SIGKILL of megatron-core ranks, launchers and inference servers, also while they load weights; continued, compared.

Real processes on CPU: two ranks over gloo, vLLM servers, an SGLang server. A run is started, a victim killed when a
drawn number of iterations is done, and the same command started until it ends normally. Runs without servers must have
the same bytes as undisturbed. Servers sum in the order of their batches, so there every sampled token must be the same,
and the weights up to rounding.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from attack_suites import toy_runs
from creditgraph.components.engine.guard import descendants
from creditgraph.pipeline.core.streams import Stream
from creditgraph.pipeline.run.recording import read_payload

ITERATIONS = 5
INSTANTS = 2  # of each setup and victim
SECONDS = 900.0  # until a start has ended
STARTS = 4
ROUNDING = 1e-5  # largest difference of a weight after the steps of a run, whose gradients differ by rounding
SETTINGS = [
    "recipe=toy_grpo",
    "prompts.batch=2",
    "sampler.group_size=4",
    "sampler.max_tokens=64",
    "evaluator.every=0",
    "evaluator.num_problems=2",
    f"run.iterations={ITERATIONS}",
    "run.checkpoint.every=1",
    "run.record.every=1",
    "model.max_context=192",
    "learner.optimizer.eps=1e-3",  # large, so that rounding of gradients near zero is not made into whole steps
]
ROOT = toy_runs.ROOT
SGLANG = ROOT / ".venv-sglang" / "bin" / "python"
MARK = "CREDITGRAPH_ATTACK"  # environment variable with the name of a case: finds its processes, whoever started them
SETUPS = {
    "megatron, tensor parallel": ["learner=megatron", "learner.tensor_parallel=2"],
    "megatron, pipeline parallel": ["learner=megatron", "learner.pipeline_parallel=2"],
    "vLLM, one server": ["engine=vllm", "engine.servers=1"],
    "vLLM, three servers": ["engine=vllm", "engine.servers=3"],
    "SGLang, one server": [
        "engine=sglang",
        "engine.servers=1",
        f"engine.process.python={SGLANG}",
        f"engine.process.environment={{PYTHONPATH: '{ROOT}/tests/sglang_cpu'}}",
    ],
}
OF_RANKS = ("rank 0", "rank 1", "the launcher", "everything")
OF_SERVERS = ("a server", "a server that loads weights", "all servers", "everything")
FOLDER = Path()


@dataclass(frozen=True)
class Case:
    """A setup, what is killed in it, and when: after a number of iterations, and some seconds."""

    setup: str
    victim: str
    after: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.setup}: {self.victim}, {self.seconds:.2f} s after iteration {self.after}"

    @property
    def served(self) -> bool:
        return "server" in self.setup


def use(folder: Path) -> None:
    """Names the folder of all runs."""
    global FOLDER
    FOLDER = folder
    (folder / "main.py").write_text(
        "import sys\nfrom creditgraph.pipeline.app.cli import main\n"
        "if __name__ == '__main__':\n    sys.exit(main(sys.argv[1:]))\n"
    )
    undisturbed.cache_clear()


def cases() -> list[Case]:
    found = []
    for setup in SETUPS:
        for victim in OF_SERVERS if "server" in setup else OF_RANKS:
            draws = Stream("attack", "processes", setup, victim)
            uid = torch.arange(INSTANTS)
            after = (draws.uniform(uid, "iteration") * (ITERATIONS - 1)).int().tolist()
            seconds = draws.uniform(uid, "seconds").tolist()
            found += [Case(setup, victim, n, s) for n, s in zip(after, seconds, strict=True)]
    return found


def quick() -> list[Case]:
    """None: a case starts real processes three times, which takes minutes."""
    return []


def run(case: Case) -> tuple[bool, str]:
    name = str(case).replace(" ", "-").replace(",", "").replace(":", "")
    path = FOLDER / name
    whole = undisturbed(case.setup)
    process = _start(case.setup, name)
    try:
        killed = _kill(case, process, path)
        codes = [_ended(process, name)]
        while codes[-1] and len(codes) < STARTS:
            process = _start(case.setup, name)
            codes.append(_ended(process, name))
    finally:
        left = _processes(name)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    at = f"killed {killed} processes, exit codes {codes}"
    if codes[-1]:
        return False, f"{at}: {_last_words(name)}"
    same, how = _compared(path, whole, case.served)
    return same and killed > 0, f"{at}; {how}"


@cache
def undisturbed(setup: str) -> Path:
    """The directory of a run that nothing is done to."""
    name = f"whole-{list(SETUPS).index(setup)}"
    code = _ended(_start(setup, name), name)
    if code:
        raise RuntimeError(f"the undisturbed run ended with {code}: {_last_words(name)}")
    return FOLDER / name


def _start(setup: str, name: str) -> subprocess.Popen:
    settings = [*SETTINGS, *SETUPS[setup], f"run.root={FOLDER}", f"run.name={name}"]
    command = [sys.executable]
    if "server" in setup:
        (FOLDER / "channels").mkdir(exist_ok=True)
        settings += [f"engine.channel.path={FOLDER}/channels/{name}", "engine.pool.hang_seconds=10"]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: name}
    command += [str(FOLDER / "main.py"), "train", *settings]
    with (FOLDER / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _ended(process: subprocess.Popen, name: str) -> int:
    """Exit code of a start, when all of its processes are gone."""
    deadline = time.monotonic() + SECONDS
    code = process.wait(SECONDS)
    while _processes(name):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of the run are left after {SECONDS:g} s: {_processes(name)}")
        time.sleep(0.2)
    return code


def _kill(case: Case, process: subprocess.Popen, path: Path) -> int:
    """Kills the victim at its instant; returns the number of processes."""
    deadline = time.monotonic() + SECONDS
    while not _reached(case, path):
        if process.poll() is not None or time.monotonic() > deadline:
            return 0
        time.sleep(0.005)
    if case.victim != "a server that loads weights":
        time.sleep(case.seconds)
    victims = _victims(case, process, path.name)
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(victims)


def _reached(case: Case, path: Path) -> bool:
    if case.victim == "a server that loads weights":  # of an update: the files of the new version are just there
        versions = (FOLDER / "channels" / path.name).glob("*/v*")
        return any(int(v.name[1:]) > case.after for v in versions if v.name[1:].isdecimal())
    metrics = path / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") > case.after


def _victims(case: Case, process: subprocess.Popen, name: str) -> list[int]:
    if case.victim == "the launcher":
        return [process.pid]
    if case.victim == "everything":
        return _processes(name)
    if case.victim.startswith("rank"):
        number = f"RANK={case.victim[-1]}".encode()
        return [p for p in descendants(process.pid) if number in _read(p, "environ").split(b"\0")][:1]
    below = [p for p in descendants(process.pid) if b"guard.py" in _read(p, "cmdline")]
    guards = [p for p in below if not any(p in descendants(other) for other in below if other != p)]
    chosen = guards if case.victim == "all servers" else guards[-1:]
    return [p for guard in chosen for p in descendants(guard) if b"guard.py" not in _read(p, "cmdline")]


def _processes(name: str) -> list[int]:
    """Processes that a case has started, directly or not."""
    mark = f"{MARK}={name}".encode()
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if mark in _read(pid, "environ").split(b"\0")]


def _read(pid: int, file: str) -> bytes:
    try:
        return Path("/proc", str(pid), file).read_bytes()
    except OSError:
        return b""


def _last_words(name: str) -> str:
    lines = (FOLDER / f"{name}.log").read_text(errors="replace").splitlines()
    return " ".join([line for line in lines if line.startswith("creditgraph")][-1:] or lines[-1:])[:300]


def _compared(path: Path, whole: Path, served: bool) -> tuple[bool, str]:
    newest = f"checkpoints/{ITERATIONS - 1:06d}"
    if not served:
        # megatron-core writes times and random names into .metadata.
        names = [p.relative_to(whole) for p in (whole / newest).rglob("*") if p.is_file()]
        names = [name for name in names if name.name not in ("manifest.json", ".metadata")]
        different = [str(name) for name in names if toy_runs._sum(path / name) != toy_runs._sum(whole / name)]
        return not different, f"different: {', '.join(different)}" if different else f"the same {len(names)} files"
    for iteration in range(ITERATIONS):
        name = f"record/sampler.trajectories/{iteration:06d}.parquet"
        one, other = (read_payload(folder / name).response_tokens.to_lists() for folder in (path, whole))
        if one != other:
            rows = sum(a != b for a, b in zip(one, other, strict=False))
            return False, f"{rows} rows of iteration {iteration} were sampled differently"
    one, other = (load_file(folder / newest / "tensors.safetensors") for folder in (path, whole))
    largest = max(float((one[k].double() - other[k].double()).abs().max()) for k in other if other[k].numel())
    return largest <= ROUNDING, f"the same tokens; tensors differ by at most {largest:.1e}"
