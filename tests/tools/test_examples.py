"""Every command and every YAML block of README, of the pages and of `--help` is sound as it stands.

Commands of `creditgraph` are parsed, and their configurations composed and checked, as far as that needs no run, no
GPU, no SLURM and no network. `tools/...` commands have the options that they name. Blocks that are marked as tested run
as a whole, see test_docs.py; those of adding-a-method.md in tests/configs.
"""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import yaml
from pages import working_in

from creditgraph.components.data.sources import parse_source
from creditgraph.pipeline.app.cli import all_commands, main
from creditgraph.pipeline.app.cluster.settings import load_cluster, split_overrides
from creditgraph.pipeline.app.sweep import build_all, combinations
from creditgraph.pipeline.core.graph import build_graph
from creditgraph.pipeline.core.registry import known_components
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices

COMMANDS = all_commands()
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name != "adding-a-method.md")]
OPEN = re.compile(
    r"…|\b(?:NAME|RUN|NODE|PATH|FILE|MODEL|COMMAND|METHOD|ROLE|RECIPE|SEED|N)\b|<"
)  # what the reader fills in
IDEAS = re.compile(r"^```python\n# my_package/ideas.py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The blocks that no other test runs: those after <!-- tested --> are run by test_docs.py."""
    found = re.findall(rf"^(<!-- tested -->\n)?```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for tested, block in found if not tested]


def command_lines(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def written() -> list[tuple[str, str]]:
    """(place, command line) of every block, every inline command, and every example of `--help`."""
    found = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        found += [(name, line) for block in blocks(page, "bash") for line in command_lines(block)]
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        found += [(name, line) for line in re.findall(r"`((?:torchrun [^`]*)?creditgraph [a-z]+ [^`\n]+)`", prose)]
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser()
        command.configure(parser)
        found += [(f"{name} --help", line) for line in (parser.epilog or "").splitlines() if " creditgraph " in line]
    return [(place, line.strip()) for place, line in found]


OURS = [
    (place, words)
    for place, line in written()
    if not OPEN.search(line.partition("#")[0]) and "creditgraph" in (words := shlex.split(line, comments=True))
]
TOOLS = [(p, words) for p, line in written() if (words := shlex.split(line, comments=True))[0].startswith("tools/")]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the component and the reward function that pages have their reader write."""
    (tmp_path / "rewards.py").write_text("def right(prompt, response, answer):\n    return 1.0\n")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "ideas.py").write_text(IDEAS.search(PAGES[0].read_text())[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_there_are_examples() -> None:
    assert len(OURS) > 40
    assert len(TOOLS) > 15


@pytest.mark.parametrize(("place", "words"), OURS, ids=[f"{p}: {' '.join(w)}"[:90] for p, w in OURS])
def test_a_command_is_sound(place: str, words: list[str]) -> None:
    name, *arguments = words[words.index("creditgraph") + 1 :]
    parser = argparse.ArgumentParser(prog=name)
    COMMANDS[name].configure(parser)
    options = parser.parse_intermixed_args(arguments)  # SystemExit for an option that does not exist
    overrides = list(getattr(options, "overrides", []))
    if name == "submit":
        cluster, own, overrides = split_overrides(overrides)
        load_cluster(cluster or "one_node", own)
    if name in ("train", "graph", "submit") and overrides and not getattr(options, "evaluate", None):
        # What pages combine with "one run each" is a sweep.
        build_all(combinations(overrides) if getattr(options, "multirun", False) else [overrides])
    for group in ("recipe", "suite", "model", "engine", "cluster"):
        chosen = [w.partition("=")[2] for w in arguments if w.startswith(f"{group}=")]
        names = {one for many in chosen for one in many.split(",")}
        assert names <= set(list_choices(group, [CONFIG_DIR])), group
    if name == "components":
        assert all(any(known.startswith(n) for known in known_components()) for n in options.names)


@pytest.mark.parametrize(("place", "words"), TOOLS, ids=[f"{p}: {' '.join(w)}"[:90] for p, w in TOOLS])
def test_a_tool_has_the_options_that_a_page_names(place: str, words: list[str]) -> None:
    text = (ROOT / words[0]).read_text()
    own = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    if words[0] != "tools/test":  # it hands most of them to pytest
        assert {option for option in own if f'"{option}"' not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_yaml_block_is_sound(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        values = yaml.safe_load(block)
        if "defaults" in values and "nodes" in values:
            (tmp_path / "recipe").mkdir(exist_ok=True)
            (tmp_path / "recipe" / "written.yaml").write_text(f"# @package _global_\n{block}")
            build_all([["recipe=written"]], [tmp_path])
        elif "nodes" in values:
            build_graph(values)
        elif "train" in values:
            parse_source(values["train"], "data.train")
        elif "jobs" in values:  # a workflow of a CI service
            steps = [step for job in values["jobs"].values() for step in job["steps"]]
            assert all({"uses", "run"} & set(step) for step in steps)
            commands = [shlex.split(step["run"]) for step in steps if step.get("run", "").startswith("creditgraph ")]
            assert commands
            for _, name, *arguments in commands:
                parser = argparse.ArgumentParser(prog=name)
                COMMANDS[name].configure(parser)
                parser.parse_intermixed_args(arguments)
        else:
            assert {"title", "version", "tasks"} <= set(values), "a kind of block that no test reads"


def test_the_component_of_the_readme_trains(
    elsewhere: Path, capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """The README's command as it stands, but for its length."""
    (line,) = re.findall(r"^creditgraph (train .*my_package\.ideas:SignCredit)$", PAGES[0].read_text(), re.MULTILINE)
    short = ["run.iterations=1", "prompts.batch=2", "evaluator.num_problems=2"]
    with working_in(elsewhere):
        assert main([*line.split(), *short]) == 0

    assert "dropped normalize=std" in caplog.text
    assert "run directory: " in capfd.readouterr().out
