"""For the scripts of this folder: they run with the project's own Python, whichever one the shell starts."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def use_project_python() -> None:
    """Starts the script again with .venv's Python unless it runs there, or torch is importable where it runs."""
    python = ROOT / ".venv" / "bin" / "python"
    if Path(sys.prefix).resolve() == (ROOT / ".venv").resolve() or (not python.exists() and find_spec("torch")):
        return
    if not python.exists():
        sys.exit(f"{sys.argv[0]}: no environment at {ROOT / '.venv'}; make it with tools/quickstart or tools/test.")
    os.execv(str(python), [str(python), *sys.argv])
