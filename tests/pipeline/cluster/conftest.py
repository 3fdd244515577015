"""A real SLURM on this host, shared by the tests of a session."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def slurm():
    """Starts munged, slurmctld and slurmd below a folder; sets SLURM_CONF."""
    if os.getuid() != 0:
        pytest.skip("SLURM's daemons need root; run the tests in a container as root")
    if shutil.which("slurmctld") is None and not Path("/usr/sbin/slurmctld").exists():
        pytest.skip("no slurmctld; install it with: apt-get install slurmctld slurmd slurm-client munge")
    folder = Path(tempfile.mkdtemp(prefix="cg-slurm-"))  # sockets want short paths, daemons one that others may enter
    tool = ROOT / "tools" / "slurm_here"
    started = subprocess.run([tool, "start", folder, "128"], capture_output=True, text=True, timeout=120, check=False)
    try:
        assert started.returncode == 0, started.stderr
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield folder
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
    finally:
        subprocess.run([tool, "stop", folder], check=False, timeout=30)
        shutil.rmtree(folder, ignore_errors=True)
