"""The version of creditgraph that runs."""

from __future__ import annotations


def version_text() -> str:
    """The version of the installed package, with its commit in a checkout."""
    import subprocess
    from importlib.metadata import PackageNotFoundError, version

    from creditgraph.pipeline import ROOT

    try:
        number = version("creditgraph")
    except PackageNotFoundError:
        number = "(not installed)"
    if not (ROOT.parent / ".git").exists():
        return number
    command = ["git", "-C", str(ROOT.parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return number
    return f"{number}, commit {done.stdout.strip()}" if done.returncode == 0 else number
