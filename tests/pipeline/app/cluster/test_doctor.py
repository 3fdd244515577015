"""Checks of installation, node and shared folder."""

import os
import socket

import pytest

from pipeline.app.cluster import doctor


def states(findings):
    return {f.name: f.state for f in findings}


def test_this_installation_is_sound():
    result = states(doctor.installation())
    assert result["torch"] == result["python"] == "ok"
    assert "FAIL" not in result.values()


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
    assert finding.state == "warn"  # nothing in a run goes by clocks, so a job starts all the same
    assert "its clock is +60" in finding.text
    assert "chrony" in finding.text


def test_a_folder_that_not_all_nodes_see(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    result = list(doctor._seen_by_all(tmp_path, deadline=0.5))
    assert "1 of 2 nodes do not write here" in result[0].text
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    (finding,) = doctor.shared(tmp_path / "elsewhere")
    assert finding.state == "FAIL"
    assert finding.text.startswith("not there on this node; expected a folder shared by all nodes")
    assert not (tmp_path / "elsewhere").exists()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nodes_exchange_numbers_before_anything_heavy():
    port = free_port()
    child = os.fork()
    if not child:
        os._exit(0 if doctor.interconnect(1, 2, "127.0.0.1", port).state == "ok" else 1)
    finding = doctor.interconnect(0, 2, "127.0.0.1", port)
    assert os.waitpid(child, 0)[1] == 0
    assert finding.state == "ok"
    assert finding.text.startswith("2 nodes sum 4 MB in ")


def test_a_node_that_does_not_answer():
    port = free_port()
    finding = doctor.interconnect(0, 2, "127.0.0.1", port, seconds=1.0)
    assert finding.state == "FAIL"
    assert f"2 nodes did not exchange numbers through 127.0.0.1:{port}" in finding.text
    assert finding.text.endswith("see that no firewall is between nodes, and set cluster.interface")


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
