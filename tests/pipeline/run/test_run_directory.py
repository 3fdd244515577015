import json
import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import toy_graph as toy
import yaml

from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.settings import place_settings
from creditgraph.pipeline.run.run_directory import RunDirectory, differences, lock_holder, locked, write_aside, writing

CONFIG = {
    "run": {"seed": 0, "iterations": 5},
    "nodes": {"a": {"use": "x", "in": {"p": "b.c"}, "config": {"betas": [0.9, 0.99]}}},
}


def test_a_new_run_gets_its_folders_and_configuration(tmp_path):
    with RunDirectory.open(tmp_path / "deep" / "r", CONFIG) as run:
        assert yaml.safe_load(run.config_path.read_text()) == CONFIG
        assert all(p.is_dir() for p in (run.path / "record", run.path / "checkpoints", run.path / "logs"))


def test_a_second_process_is_refused_and_the_error_names_who_runs(tmp_path):
    with RunDirectory.open(tmp_path / "r", CONFIG):
        with pytest.raises(RunError) as caught:
            RunDirectory.open(tmp_path / "r", CONFIG)
        text = str(caught.value)
        assert f"{tmp_path / 'r'}: in use by process {os.getpid()} on {socket.gethostname()} since 20" in text
        assert "wait for it, stop it, or choose another run.name" in text
    RunDirectory.open(tmp_path / "r", CONFIG).close()


def test_a_lock_says_who_has_it_until_it_is_given_back(tmp_path):
    path = tmp_path / "lock"
    assert lock_holder(path) == ""
    with locked(path, "wait"):
        assert lock_holder(path).startswith(f"process {os.getpid()} on {socket.gethostname()} since ")
        with (
            pytest.raises(RunError, match=f"in use by process {os.getpid()} on .*, or take another"),
            locked(path, "take another"),
        ):
            pass
    assert lock_holder(path) == ""


def run_an_iteration(path, config):
    with RunDirectory.open(path, config) as run:
        run.metrics_path.write_text('{"iteration": 0}\n')


def test_another_configuration_may_take_a_run_without_an_iteration(tmp_path):
    """A mistake that shows at the first start must not refuse its own correction."""
    RunDirectory.open(tmp_path / "r", CONFIG).close()
    RunDirectory.open(tmp_path / "r", {**CONFIG, "nodes": {}}).close()
    assert yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())["nodes"] == {}


def fail_in(path, write=lambda run: None, error=ConfigError):
    def start():
        with RunDirectory.open(path, CONFIG) as run:
            write(run)
            raise error("a mistake")

    with pytest.raises(error):
        start()


def test_a_mistake_at_the_first_start_leaves_nothing(tmp_path):
    fail_in(tmp_path / "runs" / "deep" / "r")
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    fail_in(tmp_path / "runs" / "r")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("file", ["logs/engine-0.log", "rejected.jsonl", "metrics.jsonl", "checkpoints/000000"])
def test_what_an_error_may_refer_to_and_results_are_kept(tmp_path, file):
    fail_in(tmp_path / "r", lambda run: (run.path / file).write_text("something\n"))
    assert (tmp_path / "r" / file).exists()


def test_a_directory_that_was_there_or_a_crash_is_left(tmp_path):
    (tmp_path / "submitted").mkdir()
    (tmp_path / "submitted" / "job.sh").write_text("srun\n")
    fail_in(tmp_path / "submitted")
    assert (tmp_path / "submitted" / "job.sh").exists()
    fail_in(tmp_path / "crashed", error=ZeroDivisionError)
    assert (tmp_path / "crashed" / "config.yaml").exists()


def test_free_settings_may_change(tmp_path):
    RunDirectory.open(tmp_path / "r", CONFIG).close()
    with RunDirectory.open(tmp_path / "r", {**CONFIG, "run": {"seed": 0, "iterations": 9}}) as run:
        assert yaml.safe_load(run.config_path.read_text())["run"]["iterations"] == 9


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({**CONFIG, "run": {"seed": 1, "iterations": 5}}, "  run.seed: was 0, now 1"),
        ({**CONFIG, "nodes": {"a": {**CONFIG["nodes"]["a"], "use": "y"}}}, "  nodes.a.use: was 'x', now 'y'"),
        ({**CONFIG, "nodes": {**CONFIG["nodes"], "b": {"use": "z"}}}, "  nodes.b: was absent, now {'use': 'z'}"),
    ],
)
def test_another_graph_or_seed_is_refused_unless_allowed(tmp_path, config, line):
    run_an_iteration(tmp_path / "r", CONFIG)
    with pytest.raises(RunError) as caught:
        RunDirectory.open(tmp_path / "r", config)
    assert "holds a run with another configuration:" in str(caught.value)
    assert line in str(caught.value).splitlines()
    assert "run.allow_changes=true" in str(caught.value)
    RunDirectory.open(tmp_path / "r", CONFIG).close()  # the refusal released the lock and kept the configuration
    RunDirectory.open(tmp_path / "r", config, allow_changes=True).close()


def test_tuples_and_lists_are_no_difference(tmp_path):
    RunDirectory.open(tmp_path / "r", {"nodes": {"b": [1, 2]}}).close()
    RunDirectory.open(tmp_path / "r", {"nodes": {"b": [1, 2]}}).close()
    assert differences({"a": 1}, {"a": True}) == [("a", 1, True)]


def test_a_broken_configuration_file_is_a_sentence(tmp_path):
    run_an_iteration(tmp_path / "r", CONFIG)
    (tmp_path / "r" / "config.yaml").write_text("a: [")
    with pytest.raises(RunError, match=r"config\.yaml: cannot be read .*choose another run\.name or remove the run"):
        RunDirectory.open(tmp_path / "r", CONFIG)


def test_a_file_in_the_way_is_a_sentence(tmp_path):
    (tmp_path / "r").write_text("")
    with pytest.raises(RunError, match=r"r: cannot be written .*a file is in the place of a folder"):
        RunDirectory.open(tmp_path / "r", CONFIG)


def test_os_errors_name_the_path_and_the_next_step(tmp_path):
    for number, step in (
        (13, "may not be written"),
        (30, "read-only"),
        (28, "disk is full"),
        (122, "quota"),
        (5, "correct this"),
    ):
        with pytest.raises(RunError, match=f"x: cannot be written .*{step}.*run.root=PATH"), writing(Path("x")):
            raise OSError(number, os.strerror(number))


def test_write_aside_replaces_whole_files(tmp_path):
    path = tmp_path / "a"
    write_aside(path, "one")
    write_aside(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, 1 MB; needs the right to mount."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True).returncode
    ):
        pytest.skip("mounting a file system is not allowed here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_read_only_directory_is_a_sentence(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(
        RunError,
        match=(
            r"cannot be written \(Read-only file system\): the file system is read-only; choose another place "
            r"with run\.root=PATH"
        ),
    ):
        RunDirectory.open(small_disk / "r", CONFIG)


def test_a_forbidden_directory_is_a_sentence():
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        was_root = os.geteuid() == 0
        if was_root:
            os.seteuid(65534)  # root may write anywhere, nobody may not
        try:
            with pytest.raises(
                RunError, match=r"cannot be written \(Permission denied\): it may not be written; choose another place"
            ):
                RunDirectory.open(Path(name) / "r", CONFIG)
        finally:
            if was_root:
                os.seteuid(0)


@pytest.mark.parametrize("filled", ["at once", "while running"])
def test_a_full_disk_ends_the_run_with_a_sentence_and_it_continues_later(small_disk, filled):
    filler = small_disk / "filler"

    class Fill:
        def node_started(self, node, iteration): ...

        def iteration_done(self, iteration, metrics):
            if iteration == 3:
                fill(filler)

    if filled == "at once":
        fill(filler)
    with pytest.raises(
        RunError, match=r"cannot be written \(No space left on device\): the disk is full; free some space"
    ):
        train(small_disk / "r", Fill())
    filler.unlink()
    assert train(small_disk / "r", None).completed == 6
    rows = [json.loads(line) for line in (small_disk / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [r["iteration"] for r in rows] == [*range(6), 6]


def fill(path):
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass


def train(path, observer):
    from creditgraph.pipeline.run.checkpoint import CheckpointSettings
    from creditgraph.pipeline.run.executor import Executor, RunSettings

    settings = RunSettings(iterations=6, checkpoint=CheckpointSettings(every=2))
    with (
        RunDirectory.open(path, {}) as run,
        Executor(toy.make_graph(1), settings, run=run, observer=observer) as executor,
    ):
        executor.setup()
        executor.restore()
        return executor.run()


@dataclass(frozen=True, kw_only=True)
class Channel:
    path: str = field(default="", metadata={"place": True})
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Pool:
    seconds: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    servers: int = field(default=0, metadata={"place": True})
    pool: Pool = field(default_factory=Pool, metadata={"place": True})
    channel: Channel = field(default_factory=Channel)
    max_rows: int = 4


def test_settings_that_say_where_something_runs_may_change(tmp_path):
    places = [f"engine.{name}" for name in place_settings(Engine)]
    assert places == ["engine.servers", "engine.pool", "engine.channel.path"]

    def config(**engine):
        return {"run": {"seed": 0}, "engine": {"use": "my.engines:Served", **engine}}

    run = tmp_path / "run"
    run_an_iteration(run, config(servers=0, pool={"seconds": 900}, channel={"path": "/a"}))
    RunDirectory.open(run, config(servers=2), places=places).close()
    for changed in (config(servers=2, max_rows=8), config(servers=2, channel={"dtype": "bfloat16"})):
        with pytest.raises(RunError, match="another configuration"):
            RunDirectory.open(run, changed, places=places)
