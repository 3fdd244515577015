"""Pictures and tables in the documentation are those of the code."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_documentation_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "update_docs"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
