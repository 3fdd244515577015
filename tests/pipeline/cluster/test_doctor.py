"""Checks of installation, node and shared folder."""

import os

import pytest

from pipeline.cluster import doctor


def states(findings):
    return {f.name: f.state for f in findings}


def test_this_installation_is_sound():
    found = states(doctor.installation())
    assert found["torch"] == found["python"] == "ok"
    assert "FAIL" not in found.values()


def test_a_shared_folder(tmp_path):
    assert states(doctor.shared(tmp_path)) == {str(tmp_path): "ok"}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    (finding,) = doctor.shared(tmp_path / "file" / "below")
    assert finding.state == "FAIL"
    assert "cannot be written" in finding.text
    assert "cluster.root=PATH" in finding.text


def test_clock_skew(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.time, "time", lambda: os.stat(tmp_path).st_mtime - 60)
    (finding,) = doctor.shared(tmp_path)
    assert finding.state == "FAIL"
    assert "its clock is +60" in finding.text
    assert "chrony" in finding.text


def test_a_folder_that_not_all_nodes_see(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    found = list(doctor._seen_by_all(tmp_path, deadline=0.5))
    assert "1 of 2 nodes do not write here" in found[0].text


@pytest.mark.parametrize("visible", ["0,1"])
def test_a_job_with_gpus_that_torch_does_not_see(monkeypatch, visible):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (finding,) = doctor.devices()
    assert finding.state == "FAIL"
    assert "torch sees none" not in finding.text
    assert "sees none, though the job has GPUs" in finding.text
