"""`creditgraph status` of runs that SLURM knows nothing of; those that it does: cluster/test_slurm.py."""

import json
import os

import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.cluster.logs import follow, newest_start
from creditgraph.pipeline.run.run_directory import RunDirectory


def test_a_run_that_was_not_submitted_shows_who_runs_it_and_how_far_it_is(tmp_path, capsys):
    run = tmp_path / "mine"
    with RunDirectory.open(run, {"run": {"seed": 0, "iterations": 4}}) as directory:
        directory.metrics_path.write_text("".join(json.dumps({"iteration": n}) + "\n" for n in range(3)))
        assert main(["status", str(run)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"{run}  (not submitted; run by process {os.getpid()} on ")
        assert lines[1].startswith("  iteration 2 done (3 of 4) ")
    assert main(["status", str(run)]) == 0
    assert f"{run}  (not submitted; not running)" in capsys.readouterr().out
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3}\n{"iteration": 4}\n')  # the last iteration and the final pass
    assert main(["status", str(run)]) == 0
    assert "  all 4 iterations and the final evaluation done " in capsys.readouterr().out


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_that_is_no_run_is_an_error(tmp_path, capsys, made):
    if made:
        (tmp_path / "none").mkdir()
    assert main(["status", str(tmp_path / "none")]) == 2
    expected = "none: no job.json that can be read" if made else "none: no run there (no config.yaml)"
    assert expected in capsys.readouterr().err


@pytest.fixture
def logs(tmp_path):
    """Logs of job 7, started twice, with two more lines than are shown."""
    folder = tmp_path / "run" / "logs"
    folder.mkdir(parents=True)
    for name in ("job-7", "learner-7-0-a", "learner-7-1-a", "engine-0-7-1-b"):
        (folder / f"{name}.log").write_text("".join(f"{name} line {n}\n" for n in range(22)))
    return folder.parent


def test_logs_of_the_newest_start(logs, capsys):
    assert main(["status", str(logs), "--logs"]) == 0
    out = capsys.readouterr().out
    assert "── job-7.log (last 20 of 22 lines)\njob-7 line 2\n" in out
    assert out.index("── job-7") < out.index("── learner-7-1-a") < out.index("── engine-0-7-1-b")
    assert "learner-7-0" not in out
    assert main(["status", str(logs), "--logs", "learner", "-n", "1"]) == 0
    assert capsys.readouterr().out == "── learner-7-1-a.log (last 1 of 22 lines)\nlearner-7-1-a line 21\n"


def test_of_a_learner_restarted_in_the_allocation_the_newest_log_is_shown(logs):
    for again in (1, 2):
        (logs / "logs" / f"learner-7-1.{again}-a.log").write_text("restarted\n")
    assert [log.name for log in newest_start(logs)] == ["job-7.log", "learner-7-1.2-a.log", "engine-0-7-1-b.log"]


def test_text_in_a_log_does_not_drive_the_terminal(logs, capsys):
    (logs / "logs" / "job-7.log").write_text("a\x1b[31mb\n")
    assert main(["status", str(logs), "--logs", "job"]) == 0
    assert "a␛[31mb" in capsys.readouterr().out


def test_a_log_is_followed(logs):
    log = logs / "logs" / "learner-7-1-a.log"
    lines = follow(log)
    assert [next(lines) for _ in range(22)][-1] == "learner-7-1-a line 21"
    with log.open("a") as file:
        file.write("new\n")
    assert next(lines) == "new"


def test_a_job_that_has_the_run_comes_before_a_newer_one(logs):
    (logs / "logs" / "job-8.log").write_text("refused\n")
    assert newest_start(logs)[0].name == "job-8.log"
    (logs / "holder").write_text("7\n")
    assert newest_start(logs)[0].name == "job-7.log"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--logs", "engine-5"], "no engine-5 log; expected the directory of a submitted run that has started"),
        (["-f"], "status -f: expected --logs and one run directory"),
        (["{}", "--logs", "-f"], "status -f: expected --logs and one run directory, got 2"),
    ],
)
def test_logs_that_cannot_be_shown(logs, capsys, arguments, text):
    assert main(["status", str(logs), *(a.format(logs) for a in arguments)]) == 2
    assert text in capsys.readouterr().err
