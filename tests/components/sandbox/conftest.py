"""A way to isolate programs, found once."""

import shutil

import pytest

from creditgraph.components.sandbox.isolation import INSTALL
from creditgraph.components.sandbox.probe import find_isolation


@pytest.fixture(scope="session")
def isolation():
    if shutil.which("bwrap") is None:
        pytest.skip(f"bubblewrap is not installed. {INSTALL}")
    return find_isolation()
