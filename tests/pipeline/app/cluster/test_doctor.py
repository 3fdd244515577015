"""Checks of installation, node and shared folder."""

import importlib.metadata
import os
import re
import socket
import tomllib
from pathlib import Path

import pytest

from creditgraph.pipeline.app.cluster import doctor


def states(findings):
    return {f.name: f.state for f in findings}


PROJECT = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
EXTRAS = {
    name: list(wanted) for name, wanted in PROJECT["optional-dependencies"].items() if name not in ("dev", "docs")
}


@pytest.fixture
def declared(monkeypatch):
    """What pyproject.toml says now, whatever it said when the project was installed."""
    extras = [
        f'{text} {"and" if ";" in text else ";"} extra == "{name}"' for name, all_ in EXTRAS.items() for text in all_
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: PROJECT["dependencies"] + extras)


def test_this_installation_is_valid(declared):
    result = states(doctor.installation())
    assert result["torch"] == result["python"] == "ok"
    assert "FAIL" not in result.values()


def test_every_dependency_is_checked_once(declared):
    names = [finding.name for finding in doctor.installation()]
    wanted = [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
    expected = {re.match(r"[\w-]+", text)[0] for text in wanted} - {"creditgraph"} | {"python"}
    assert sorted(names) == sorted(expected)
    assert set(doctor.USES) == set(EXTRAS)


@pytest.mark.parametrize(
    ("line", "installed", "state", "text"),
    [
        ("torch>=2.10", None, "FAIL", "not installed; run tools/quickstart, or pip install 'torch>=2.10'"),
        ("torch>=2.10", "2.9.1", "FAIL", "expected >=2.10, got 2.9.1; pip install 'torch>=2.10'"),
        ("torch>=2.10", "2.11.0+cpu", "ok", "2.11.0+cpu"),
        (
            'peft>=0.19; extra == "lora"',
            None,
            "absent",
            "not installed; only for learner.lora.rank; pip install 'creditgraph[lora]'",
        ),
        ('peft>=0.19; extra == "lora"', "0.1", "warn", "expected >=0.19, got 0.1; pip install 'peft>=0.19'"),
    ],
)
def test_a_missing_or_old_package_comes_with_its_command(monkeypatch, line, installed, state, text):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [line])
    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = list(doctor.installation())[1]
    assert (finding.state, finding.text) == (state, text)


@pytest.mark.parametrize(("asked", "state"), [(False, "absent"), (True, "FAIL")])
@pytest.mark.parametrize("sinfo", [None, "echo no controller >&2; exit 1", "sleep 9"])
def test_a_slurm_that_nobody_asked_for_is_no_failure(tmp_path, monkeypatch, asked, state, sinfo):
    monkeypatch.setattr(doctor, "SINFO_SECONDS", 0.3)
    if sinfo:
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{sinfo}\n")
        (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if sinfo else str(tmp_path))
    (finding,) = doctor.slurm(asked)
    assert (finding.name, finding.state) == ("slurm", state)


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


def test_a_node_without_shared_memory_lacks_nothing_but_servers(monkeypatch):
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) != "/dev/shm" and exists(path))
    assert states(doctor.node())["/dev/shm"] == "absent"
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "SMALLEST_FREE_GB", 1e9)
    assert states(doctor.node())["/dev/shm"] == "FAIL"


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
    assert "see that no firewall is between them. rank 0 (" in finding.text
    assert finding.text.endswith(
        "Set cluster.interface (without SLURM, GLOO_SOCKET_IFNAME) to one through which all hosts are reached."
    )


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


@pytest.mark.parametrize(
    ("capability", "built", "state", "said"),
    [
        ((9, 0), True, "ok", "flash attention"),
        ((7, 0), True, "warn", "compute capability 7.0; expected a GPU of 8.0"),
        ((9, 0), False, "warn", "was built without flash attention"),
    ],
)
def test_a_gpu_or_a_build_without_fast_attention(monkeypatch, capability, built, state, said):
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    finding = doctor._attention(0)
    assert (finding.name, finding.state) == ("cuda:0 attention", state)
    assert said in finding.text


def test_what_a_gpu_lacks_for_learner_megatron_is_named(monkeypatch):
    import torch

    from creditgraph.components.learner.megatron import settings

    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: 1),
        ("mem_get_info", lambda i: (79e9, 80e9)),
        ("get_device_name", lambda i: "H100"),
        ("get_device_capability", lambda i: (9, 0)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None if name == "transformer_engine" else 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    found = {finding.name: finding for finding in doctor.devices()}
    assert found["cuda:0"].state == "ok"
    rope = found["learner.megatron, apply_rope_fusion"]
    assert (rope.state, rope.text) == ("absent", "off, which only costs time; pip install transformer-engine[pytorch]")
    assert "learner.megatron, gradient_accumulation_fusion" not in found
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].state == "warn"
