"""What runs with the core alone, and what with the packages that tools/quickstart installs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from installed.conftest import CHECKOUT, VARIABLES, Environment

from creditgraph.pipeline.core.errors import EXTRAS
from creditgraph.pipeline.core.registry import BUILTIN

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("installed")]

# Modules of an extra; all others are imported with the core alone.
OF_EXTRAS = (
    "creditgraph.adapters.areal",
    "creditgraph.adapters.skyrl",  # each needs the trainer that it is for
    "creditgraph.adapters.swift",
    "creditgraph.adapters.tinker",
    "creditgraph.adapters.trl",
    "creditgraph.adapters.trl_model",
    "creditgraph.adapters.trl_rows",
    "creditgraph.adapters.verl",
    "creditgraph.components.engine.vllm.exact",
    "creditgraph.components.engine.vllm.receive",
    "creditgraph.components.engine.vllm.worker",
    "creditgraph.components.environment.verifiers_harness",
    "creditgraph.components.learner.megatron.",
    "creditgraph.pipeline.app.data.preview",
)
IMPORT_ALL = """
import importlib, json, pathlib, creditgraph
root = pathlib.Path(creditgraph.__file__).parent
failed = {}
files = sorted(root.rglob("*.py"))
for file in files:
    name = ".".join(("creditgraph", *file.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
    if file.stem == "__main__":
        continue
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps([len(files), failed]))
"""
SHORT = ["run.iterations=2", "prompts.batch=4", "evaluator.num_problems=4"]


def command(line):
    """The words of a command of a page, without `creditgraph` and comment."""
    return shlex.split(line.replace("\\\n", " "), comments=True)[1:]


def commands_of(text):
    """The commands of a page's shell blocks that need nothing of the reader's own, no further extra and no cluster."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in re.findall(r"^creditgraph (?:.*\\\n)*.*$", block, re.MULTILINE)]
    # The first `#` begins a comment, which may name anything.
    return [line for line in lines if not re.search(r"engine=|cluster=|\.py|my_|your_", line.partition("#")[0])]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run that an environment with all extras has recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    train = [sys.executable, "-m", "creditgraph", "train", "recipe=toy_grpo", *SHORT, "run.name=r"]
    variables = os.environ | VARIABLES | {"PYTHONPATH": str(CHECKOUT)}
    subprocess.run(train, cwd=folder, env=variables, capture_output=True, check=True)
    return folder


def test_the_core_brings_no_extra(core, tmp_path):
    modules = sorted({module for modules in EXTRAS.values() for module in modules.split()})
    code = f"from importlib.util import find_spec; print([name for name in {modules} if find_spec(name)])"
    assert core.run(tmp_path, "-c", code).stdout == "[]\n"


def test_every_module_of_the_core_is_imported_with_it_alone(core, tmp_path):
    done = core.run(tmp_path, "-c", IMPORT_ALL)
    count, failed = json.loads(done.stdout.splitlines()[-1])
    assert count > 300
    assert {name: error for name, error in failed.items() if not name.startswith(OF_EXTRAS)} == {}


def test_the_core_lists_all_components(core, tmp_path):
    listed = json.loads(core.creditgraph(tmp_path, "components", "--json"))
    assert set(listed) == set(BUILTIN)
    assert {name: entry["problem"] for name, entry in listed.items() if entry["problem"]} == {}


def test_the_core_audits(core, tmp_path):
    assert " pass" in core.creditgraph(tmp_path, "audit", "recipe=toy_grpo")


def test_the_core_reports(core, recorded):
    printed = core.creditgraph(recorded, "report", "runs/r")
    assert "tokens are shown as ids" in printed
    assert "its curves are left out" in printed
    page = (recorded / "runs" / "r" / "report.html").read_text()
    assert "Rollouts" in page
    assert "Learning curves" not in page


def test_the_core_shows_credit(core, recorded):
    printed = core.creditgraph(recorded, "credit", "recipe=toy_grpo,toy_rredcot", "runs/r")
    assert "token ids instead of texts, and no true advantage" in printed
    assert re.search(r"^toy_grpo *$", printed, re.MULTILINE)
    assert re.search(r"^toy_rredcot .*no credit: .*creditgraph\[train\]", printed, re.MULTILINE)
    assert (recorded / "runs" / "r" / "credit.html").exists()


def test_the_core_imports_rollouts(core, tmp_path):
    rows = [{"group": "a", "prompt_ids": [1], "tokens": [5, 6], "reward": r} for r in (0, 1)]
    (tmp_path / "r.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    core.creditgraph(tmp_path, "import", "r.jsonl", "--from", "jsonl", "--graph", "grpo", "-o", "run")
    assert "tokens are shown as ids" in core.creditgraph(tmp_path, "report", "run")
    assert " pass" in core.creditgraph(tmp_path, "audit", "run")
    printed = core.creditgraph(tmp_path, "credit", "recipe=toy_grpo", "run")
    assert "recorded advantage.credit" in printed
    assert re.search(r"^toy_grpo *$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("environment", "arguments", "extra"),
    [
        ("core", ["train", "recipe=toy_grpo"], "train"),
        ("core", ["data", "preview", "recipe=toy_grpo"], "train"),
        ("core", ["import", __file__, "--from", "trl", "--tokenizer", "tiny"], "train"),
        ("default", ["train", "recipe=toy_grpo", "learner=megatron"], "megatron"),
        ("default", ["train", "recipe=toy_grpo", "run.wandb.mode=offline"], "wandb"),
    ],
)
def test_a_missing_extra_is_one_sentence(environment, arguments, extra, request, tmp_path):
    here = request.getfixturevalue(environment)
    done = here.run(tmp_path, "-m", "creditgraph", *arguments)
    assert done.returncode == 2
    assert f"pip install 'creditgraph[{extra}]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_megatron_trains_with_what_its_extra_installs(wheel, default, tmp_path):
    """In CI's own environment other extras bring what a library uses without asking for it."""
    environment = Environment(tmp_path / "megatron", below=default)
    environment.install("--no-deps", "--ignore-installed", wheel)
    environment.install(f"{wheel}[megatron]")
    environment.creditgraph(tmp_path, "train", "recipe=toy_grpo", "learner=megatron", *SHORT)
    assert list(tmp_path.glob("runs/*/checkpoints/*/**/metadata.json")), "a checkpoint of megatron-core's"


def test_the_first_commands_run_with_what_quickstart_installs(default, tmp_path):
    """Those of the README on the run that tools/quickstart makes, shortened, then those of the first-run page."""
    default.creditgraph(tmp_path, "train", "recipe=toy_srpo", "run.name=toy_srpo-s0", *SHORT)
    # What follows needs things of the reader's own; its marked examples run in tests/tools/test_docs.py.
    page = (CHECKOUT / "docs" / "first-run.md").read_text().partition("\n## Your model")[0]
    readme, first_run = commands_of((CHECKOUT / "README.md").read_text()), commands_of(page)
    assert readme
    assert len(first_run) > 3
    for line in [*readme, *first_run]:
        words = command(line)
        shorter = [text for text in SHORT if text.partition("=")[0] not in line] if words[0] == "train" else []
        default.creditgraph(tmp_path, *words, *shorter, *(["--samples", "8"] if words[0] == "credit" else []))
    for block in re.findall(r"<!-- tested -->\n```python\n(.*?)```", page, re.DOTALL):
        done = default.run(tmp_path, "-c", block)
        assert done.returncode == 0, done.stderr


def test_what_quickstart_installs_lists_all_components(default, tmp_path):
    assert "cannot be loaded" not in default.creditgraph(tmp_path, "components")


def test_resets_on_own_data_say_what_is_missing_before_and_while_they_run(default, tmp_path):
    """As a first user would: a folder with a model, a file of two columns, a reward, and SRPO."""
    shutil.copytree(CHECKOUT / "components" / "models" / "tiny", tmp_path / "my_model")
    rows = [{"prompt": f"{i % 13} s1 + {i % 8 + 2}", "answer": str((i % 13 + i % 8 + 2) % 13)} for i in range(60)]
    (tmp_path / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "rewards.py").write_text("def right(response, answer):\n    return float(answer in response.split())\n")
    own = ["train", "graph=srpo", "data=file", "data.train.path=problems.jsonl", "model.path=./my_model"]
    own += ["verifier.use=verifier.function", "verifier.function=rewards.py:right", "run.device=cpu"]

    done = default.run(tmp_path, "-m", "creditgraph", *own)
    assert done.returncode == 2
    assert (
        "template 'chat' does not ask for steps that end with </thought>; set data.train.template=thought"
        in done.stderr
    )
    assert "sampler.mode=line" in done.stderr
    assert not (tmp_path / "runs").exists()

    # The model writes no lines, so a response is one thought: that is seen while it runs.
    words = ["data.train.template=plain", "data.train.user_prompt=<solve> {question} </problem>"]
    lines = ["sampler.mode=line", "expander.mode=line", "sampler.max_tokens=32", "expander.max_tokens=32"]
    printed = default.creditgraph(
        tmp_path, *own, *words, *lines, *SHORT, "evaluator.max_tokens=32", "localizer.max_tokens=8", "run.name=r"
    )
    assert "WARNING expander/empty_prefix_share was 1 in iterations 0 to 1: every reset began at the prompt" in printed
