"""What Tab offers, asked for as a shell does: the line in the environment, the answer on file descriptor 8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from creditgraph.pipeline.app.cli import all_commands
from creditgraph.pipeline.core.registry import known_components

pytest.importorskip("argcomplete", reason="not installed here: pip install argcomplete")


def offered(line: str, folder: Path) -> set[str]:
    answer = folder / "answer"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n",  # without "=": whole words come back
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    command = [sys.executable, "-m", "creditgraph"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(answer.read_text().split("\n"))


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("creditgraph ", {*all_commands()}),
        ("creditgraph tra", {"train"}),
        ("creditgraph train re", {"recipe="}),
        ("creditgraph train recipe=toy_sr", {"recipe=toy_srpo"}),
        ("creditgraph train recipe=toy_srpo run.iter", {"run.iterations="}),
        ("creditgraph train --che", {"--check"}),
        ("creditgraph components advantage.gr", {"advantage.group"}),
        ("creditgraph components ", {"run", "sampler", *known_components()}),
    ],
)
def test_tab_offers(tmp_path, line, some):
    got = {text.strip() for text in offered(line, tmp_path)}
    assert some <= got
    last = line.split(" ")[-1]
    assert all(text.startswith(last) for text in got)
