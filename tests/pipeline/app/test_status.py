"""`creditgraph status` of runs that SLURM knows nothing of; those that it does: cluster/test_slurm.py."""

import json
import os

import pytest

from pipeline.app.cli import main
from pipeline.run.run_directory import RunDirectory


def test_a_run_that_was_not_submitted_tells_who_runs_it_and_how_far_it_is(tmp_path, capsys):
    run = tmp_path / "mine"
    with RunDirectory.open(run, {"run": {"seed": 0}}) as directory:
        directory.metrics_path.write_text("".join(json.dumps({"iteration": n}) + "\n" for n in range(3)))
        assert main(["status", str(run)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"{run}  (not submitted; run by process {os.getpid()} on ")
        assert lines[1].startswith("  iteration 2 done ")
    assert main(["status", str(run)]) == 0
    assert f"{run}  (not submitted; nobody runs it now)" in capsys.readouterr().out


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_that_is_no_run_is_told(tmp_path, capsys, made):
    if made:
        (tmp_path / "none").mkdir()
    assert main(["status", str(tmp_path / "none")]) == 2
    assert "none: no job.json that can be read" in capsys.readouterr().err
