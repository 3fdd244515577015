"""Where the parts of a server over several nodes meet."""

import threading

import pytest

from creditgraph.components.engine.served.parts import Part, meet
from creditgraph.pipeline.core.errors import ConfigError, RunError


@pytest.fixture
def task(monkeypatch):
    def task(number, step="7"):
        for name, value in (("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", number), ("SLURM_STEP_ID", step)):
            monkeypatch.setenv(name, value)

    return task


def test_the_first_task_leaves_its_address_for_the_others(task, tmp_path):
    task("0")
    first = meet(2, "127.0.0.1", tmp_path, 1.0)
    host, _, port = first.meeting.partition(":")
    assert (first.rank, host, 1024 <= int(port) < 65536) == (0, "127.0.0.1", True)
    task("1")
    assert meet(2, "10.0.0.2", tmp_path, 1.0) == Part(nodes=2, rank=1, host="10.0.0.2", meeting=first.meeting)


def test_the_others_wait_for_the_first_task_of_their_own_step(task, tmp_path):
    task("1")
    (tmp_path / "meeting-6").write_text("10.0.0.9:1")  # of a start before
    late = threading.Timer(0.3, (tmp_path / "meeting-7").write_text, ["10.0.0.1:2"])
    late.start()
    assert meet(2, "10.0.0.2", tmp_path, 30.0).meeting == "10.0.0.1:2"
    task("1", step="8")
    with pytest.raises(RunError, match=r"first node in .*meeting-8, got no such file within 0 s. Check that its nodes"):
        meet(2, "10.0.0.2", tmp_path, 0.0)


def test_other_tasks_get_a_sentence(task, tmp_path, monkeypatch):
    task("0")
    with pytest.raises(
        ConfigError, match=r"serve --nodes 3: expected a task of a SLURM step of 3 tasks, .*NUM_TASKS '2'"
    ):
        meet(3, "127.0.0.1", tmp_path, 1.0)
    monkeypatch.delenv("SLURM_PROCID")
    with pytest.raises(ConfigError, match=r"and SLURM_PROCID ''. Start it with srun, or leave --nodes out"):
        meet(2, "127.0.0.1", tmp_path, 1.0)
