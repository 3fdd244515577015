"""A real SLURM of four nodes on this host, shared by the tests of a session."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TOYS = Path(__file__).parent / "toys"
sys.path.insert(0, str(TOYS))
from slurm_jobs import TOOL, Gate, Slurm  # noqa: E402 - found on the path above


@pytest.fixture(scope="session")
def daemons():
    """Starts munged, slurmctld and four slurmds below a folder."""
    if os.getuid() != 0:
        pytest.skip("SLURM's daemons need root; run the tests in a container as root")
    if shutil.which("slurmctld") is None and not Path("/usr/sbin/slurmctld").exists():
        pytest.skip("no slurmctld; install it with: apt-get install slurmctld slurmd slurm-client munge")
    folder = Path(tempfile.mkdtemp(prefix="cg-slurm-"))  # sockets want short paths, daemons one that others may enter
    started = subprocess.run(
        [TOOL, "start", folder, "128", "4"], capture_output=True, text=True, timeout=120, check=False
    )
    try:
        assert started.returncode == 0, started.stderr
        yield Slurm(folder)
    finally:
        subprocess.run([TOOL, "stop", folder], check=False, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(daemons, monkeypatch):
    """The SLURM of the session; jobs take the environment of who submits them."""
    monkeypatch.setenv("SLURM_CONF", str(daemons.folder / "slurm.conf"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TOYS), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield daemons
    # A test that failed must not fail those after it: neither by its jobs, nor by a node between a crash and a boot.
    if daemons.call("squeue", "-h"):
        daemons.call("scancel", "--user=root")
    states = [line.split() for line in daemons.call("sinfo", "-hN", "-n", "node[1-4]", "-o", "%N %t").splitlines()]
    for node in {node for node, state in states if "down" in state}:
        daemons.node("boot", node)
    daemons.wait("the end of all jobs", lambda: not daemons.call("squeue", "-h"))


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Holds iterations of `gates:GatedPrompts` back; open until it is set."""
    gate = Gate(tmp_path / "gate")
    monkeypatch.setenv("CREDITGRAPH_TEST_GATE", str(gate.file))
    return gate
