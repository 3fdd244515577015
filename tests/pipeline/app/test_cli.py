"""The command line, in this process where possible: what users type, and what they get for typing it wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from creditgraph.pipeline.app import cli
from creditgraph.pipeline.app.cli import all_commands, main
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices

SMALL = [
    "prompts.batch=2",
    "evaluator.num_problems=4",
    "evaluator.every=0",
    "data.train.size=50",
    "data.eval.size=10",
    "run.device=cpu",
]
EVERY = ["run.checkpoint.every=1", "run.checkpoint.keep=9", "run.record.every=1"]


def toy(root: Path, *extra: str, recipe: str = "toy_grpo", name: str = "r") -> list[str]:
    return ["train", f"recipe={recipe}", f"run.root={root}", f"run.name={name}", *SMALL, "sampler.group_size=4", *extra]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three iterations with a checkpoint after each."""
    root = tmp_path_factory.mktemp("runs")
    assert main(toy(root, "run.iterations=3", *EVERY)) == 0
    return root / "r"


def errors(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_train_writes_a_run_a_person_can_read(finished: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    assert {
        "config.yaml",
        "graph.svg",
        "graph.mmd",
        "metrics.jsonl",
        "record",
        "checkpoints",
        "result.json",
    } <= names
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [r["iteration"] for r in rows] == [0, 1, 2, 3]
    assert [i for i, r in enumerate(rows) if "evaluator/accuracy" in r] == [0, 3]
    assert "learner/loss" in rows[2]
    assert yaml.safe_load((finished / "config.yaml").read_text())["recipe"] == "toy_grpo"


def test_a_finished_run_started_again_changes_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    assert main(toy(finished.parent, "run.iterations=3", *EVERY)) == 0
    assert (finished / "metrics.jsonl").read_bytes() == before
    said = capsys.readouterr()
    assert f"{finished}: finished already, 3 of 3 iterations; run.iterations=6 trains on" in said.out
    assert "held-out accuracy" in said.out
    assert "final evaluation" not in said.err  # it is not evaluated again


def test_another_configuration_in_the_same_directory_is_refused(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(toy(finished.parent, "run.iterations=3", "learner.optimizer.lr=0.5")) == 2
    text = errors(capsys)
    assert "learner.optimizer.lr" in text
    assert "run.name" in text


def test_all_mistakes_come_in_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        "learner.optimizer.lrr=1",
        "samplr.group_size=2",
        "advantage.normalize=stdd",
        "run.iteratons=3",
        "engine.use=engine.lokal",
    ]
    assert main(toy(tmp_path, *wrong)) == 2
    text = errors(capsys)
    for part in ("'lr'", "Did you mean 'sampler'?", "stdd", "'iterations'", "Did you mean 'engine.local'?"):
        assert part in text
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian"], ["unknown command 'trian'", "Did you mean 'train'?"]),
        (["train", "recipe=toy_srop"], ["no recipe named 'toy_srop'", "Did you mean 'toy_srpo'?"]),
        (["train", "recpie=toy_srpo"], ["section 'recpie'", "Did you mean 'recipe'?"]),
        (["train", "recipe=toy_srpo", "lr"], ["override 'lr'", "expected key=value"]),
        (["train"], ["no graph", "recipe=NAME"]),
        (["train", "recipe=toy_grpo", "-c", "/nowhere"], ["--config-dir", "/nowhere"]),
        (["components", "samplr.chains"], ["no component 'samplr.chains'", "Did you mean 'sampler.chains'?"]),
        (["check", "nonsense"], ["unknown component 'nonsense'", "package.module:Class"]),
        (["replay", "/nowhere", "--iteration", "0", "--node", "advantage"], ["/nowhere", "no run there"]),
        (["eval", "/nowhere"], ["/nowhere", "no run there"]),
        (["replay", "/nowhere"], ["/nowhere", "expected --iteration N and --node NAME with a run directory"]),
        (["replay", "advantage.group"], ["missing input", "trajectories=… (Trajectories)"]),
        (["replay", "advantage.group", "trajectorie=x"], ["no such socket", "Did you mean 'trajectories'?"]),
        (["replay", "advantage.grup", "rewards=x"], ["'advantage.grup'", "Did you mean 'advantage.group'?"]),
        (["replay", "advantage.group", "--node", "advantage"], ["--node is for a run directory", "socket=FILE"]),
        (["replay", "/tmp", "rewards=x", "--seed", "1"], ["/tmp", "rewards=x, --seed is for a component"]),
        (["graph", "recipe=toy_srpo", "-o", "x.txt"], ["got '.txt'", ".svg"]),
        (
            ["graph", "recipe=toy_srpo", "-o", "/nowhere/x.svg"],
            ["/nowhere/x.svg: cannot be written", "an existing folder"],
        ),
        (
            ["train", "-m", "recipe=toy_grpo", "run.seed=0,1", "sampler.group_sze=4"],
            ["sampler.group_sze", "Did you mean 'group_size'?"],
        ),
    ],
)
def test_a_wrong_command_gets_a_sentence(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    text = errors(capsys)
    for part in parts:
        assert part in text
    assert "Traceback" not in text


def test_graph_formats_and_listing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "recipe=toy_srpo"]) == 0
    assert "localizer" in capsys.readouterr().out
    for ending in ("svg", "mmd"):
        assert main(["graph", "graph=srpo", "-o", str(tmp_path / f"g.{ending}")]) == 0
        assert "expander" in (tmp_path / f"g.{ending}").read_text()
    capsys.readouterr()
    assert main(["graph", "--list"]) == 0
    assert "toy_srpo_oracle" in capsys.readouterr().out


def test_components_lists_sockets_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["components", "advantage.group", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)["advantage.group"]
    assert entry["takes"]["trajectories"] == "Trajectories"
    assert "normalize" in [s["name"] for s in entry["settings"]]


@pytest.mark.parametrize("command", [["--help"], ["replay", "--help"], ["graph", "--list"]])
def test_light_commands_do_not_import_torch(command: list[str]) -> None:
    """`--help` imports the module of every command, so one that imports torch at its top makes it slow."""
    code = (
        f"import sys; from creditgraph.pipeline.app.cli import main\ntry: main({command!r})\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_locale_without_unicode_gets_question_marks() -> None:
    code = "from creditgraph.pipeline.app.cli import main; main(['--help'])"
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=ascii_only, check=True)
    assert b"first steps:" in done.stdout
    assert b"?" in done.stdout


def test_commands_have_a_summary_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listing = capsys.readouterr().out
    assert "cannot be loaded" not in listing
    for name, command in all_commands().items():
        assert f"  {name:<14}{command.SUMMARY}" in listing
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"usage: creditgraph {name}" in capsys.readouterr().out


def test_a_command_of_a_broken_package_is_a_sentence(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli.COMMANDS, "mine", EntryPoint("mine", "no_such_module", cli.COMMAND_GROUP))
    reason = "no_such_module cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"
    assert main(["--help"]) == 0
    listing = capsys.readouterr().out
    assert f"  mine          {reason}" in listing
    assert "  train         Train" in listing
    for arguments in ([], ["--help"], ["a", "--b=1"]):
        assert main(["mine", *arguments]) == 2
        assert errors(capsys).startswith(f"creditgraph mine: {reason}")
    assert "train" in all_commands()
    assert "mine" not in all_commands()


def test_options_and_overrides_may_alternate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipe=toy_grpo", "--check", "run.seed=1"]) == 0
    assert "valid: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", "recipe=toy_grpo", "--chek"])
    assert "unrecognized arguments: --chek" in errors(capsys)


def test_every_shipped_graph_and_recipe_is_sound_and_checked_without_heavy_imports() -> None:
    code = (
        "import sys; from creditgraph.pipeline.app.cli import main\ncode = main(['graph', '--check-all'])\n"
        "names = 'transformers', 'datasets', 'vllm', 'sglang', 'megatron', 'sympy', 'torch.distributed.tensor'\n"
        "heavy = [m for m in names if m in sys.modules]\nprint(code, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, said, last = done.stdout.splitlines()
    assert last == "0 []", done.stdout
    shipped = sum(len(list_choices(group, [CONFIG_DIR])) for group in ("graph", "recipe"))
    assert said.startswith(f"{shipped} of {shipped} graphs and recipes are valid")


def test_replay_gives_a_sampler_its_backlog_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The component is fresh, and so has no state of its own yet, when the checkpoint is read."""
    few = [
        "prompts.batch=8",
        "sampler.groups=2",
        "sampler.group_size=4",
        "run.iterations=2",
        "run.checkpoint.every=1",
        "run.record.every=1",
    ]
    assert main(["train", "recipe=toy_dapo", *few, f"run.root={tmp_path}", "run.name=d", "~evaluator"]) == 0
    backlog = [json.loads(line) for line in (tmp_path / "d" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("sampler/backlog") for row in backlog)
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "d"), "--iteration", "1", "--node", "sampler"]) == 0
    out = capsys.readouterr().out
    assert "the same bits as recorded" in out
    assert "differs" not in out


def test_replay_gives_the_recorded_bits_and_shows_changes(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for node in ("advantage", "sampler", "rewards", "prompts"):
        assert main(["replay", str(finished), "--iteration", "2", "--node", node]) == 0
        out = capsys.readouterr().out
        assert "the same bits as recorded" in out
        assert "differs" not in out
    assert main(["replay", str(finished), "--iteration", "2", "--node", "advantage", "-s", "normalize=mean"]) == 0
    out = capsys.readouterr().out
    assert "advantage.credit: differs from the record" in out or "mean 0 " in out
    assert main(["replay", str(finished), "--iteration", "2", "--node", "advantage", "-s", "normalise=mean"]) == 2
    assert "Did you mean 'normalize'?" in errors(capsys)
    assert main(["replay", str(finished), "--iteration", "9", "--node", "advantage"]) == 2
    assert "recorded iterations: 0-2" in errors(capsys)


def test_replay_of_a_component_on_files(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = finished / "record"
    files = [
        f"trajectories={record}/sampler.trajectories/000001.parquet",
        f"rewards={record}/rewards.rewards/000001.parquet",
    ]
    assert main(["replay", "advantage.group", *files, "-s", "normalize=mean", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "credit.parquet").exists()
    capsys.readouterr()
    prompts = f"prompts={record}/prompts.batch/000001.parquet"
    settings = ["-s", "mode=thought", "-s", "group_size=2", "-s", "max_tokens=128"]
    assert main(["replay", "sampler.chains", prompts, "policy=engine.local", *settings]) == 0
    assert "Trajectories, 4 rows" in capsys.readouterr().out
    assert main(["replay", "advantage.group", "trajectories=/nowhere.parquet", "rewards=/nowhere.parquet"]) == 2
    assert "no such record" in errors(capsys)


def test_eval_of_the_newest_checkpoint_repeats_the_final_accuracy(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(finished), "evaluator.samples=2"]) == 0
    metrics = json.loads((finished / "eval.json").read_text())["metrics"]
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["evaluator/accuracy"] == last["evaluator/accuracy"]
    assert "evaluator/pass_at_2" in metrics
    assert main(["eval", str(finished), "evaluator.sample=2"]) == 2
    assert "Did you mean 'samples'?" in errors(capsys)


def test_user_configs_and_components_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One new file and one YAML: an advantage of one's own, wired in by module:Class from ./configs."""
    (tmp_path / "my_ideas.py").write_text(
        "from creditgraph.components.advantage.group import GroupAdvantage\n\n\n"
        "class Doubled(GroupAdvantage):\n    '''Twice the credit.'''\n"
    )
    (tmp_path / "configs" / "recipe").mkdir(parents=True)
    (tmp_path / "configs" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [toy_grpo]\nadvantage: {use: 'my_ideas:Doubled'}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["train", "recipe=mine", "--check"]) == 0


def test_multirun_makes_one_run_per_combination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["untouched"])
    before = dict(os.environ)
    swept = ["sampler.group_size=2", "run.seed=0,1", "advantage.normalize=choice(std,mean)"]
    assert main(["train", "-m", "recipe=toy_grpo", f"run.root={tmp_path}", "run.iterations=1", *SMALL, *swept]) == 0
    names = sorted(p.name for p in tmp_path.iterdir() if (p / "result.json").exists())
    assert len(names) == 4
    assert sum("std" in n for n in names) == sum("mean" in n for n in names) == 2
    assert sys.argv == ["untouched"]
    assert dict(os.environ) == before


def test_a_sweep_is_checked_before_its_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["train", "-m", "recipe=toy_grpo", f"run.root={tmp_path}", *SMALL]
    assert main([*wrong, "advantage.normalize=std,stdd"]) == 2
    assert "stdd" in errors(capsys)
    assert main([*wrong, "run.seed=0,1", "run.name=one"]) == 2
    assert "two runs would share" in errors(capsys)
    assert main([*wrong, "learner.optimizer.lr=interval(0,1)"]) == 2
    assert "expected learner.optimizer.lr=a,b" in errors(capsys)
    assert main([*wrong, "advantage.normalize=std,stdd", "learner.optimizer.lr=1e-4,abc"]) == 2
    assert "-m: 3 of 4 runs cannot start, so none does: 2 problems" in errors(capsys)
    assert not list(tmp_path.iterdir())
    assert main([*wrong, "run.seed=range(0,3)", "--check"]) == 0
    assert capsys.readouterr().out.count("valid: ") == 3


def start(root: Path, *extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "creditgraph", *toy(root, *extra)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def wait_for(path: Path, lines: int, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} did not reach {lines} lines")


def without_times(path: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if "seconds" not in k and not k.startswith("utilisation/")} for row in rows]


def test_interrupted_and_killed_training_continues_to_the_same_weights(tmp_path: Path) -> None:
    """The real toy graph: Ctrl-C, SIGKILL, then the end; its weights and metrics are the uninterrupted run's."""
    length = ["run.iterations=9", "run.checkpoint.every=2"]
    assert main(toy(tmp_path, *length, name="whole")) == 0
    cut = tmp_path / "r"
    process = start(tmp_path, *length)
    try:
        wait_for(cut / "metrics.jsonl", 2)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 130, said
    finally:
        process.kill()
    done = json.loads((cut / "metrics.jsonl").read_text().splitlines()[-1])["iteration"]
    assert f"stopped at {done + 1} of 9 iterations; the same command continues the run" in said
    assert (cut / "checkpoints" / f"{done:06d}" / "manifest.json").exists()
    process = start(tmp_path, *length)
    wait_for(cut / "metrics.jsonl", done + 3)
    process.kill()
    process.wait()
    assert main(toy(tmp_path, *length)) == 0
    whole = tmp_path / "whole"
    tensors = "checkpoints/000008/tensors.safetensors"
    assert (whole / tensors).read_bytes() == (cut / tensors).read_bytes()
    assert without_times(whole / "metrics.jsonl") == without_times(cut / "metrics.jsonl")


def test_overlap_gives_the_same_bits(tmp_path: Path) -> None:
    graph = "nodes.engine.in.weights=learner.weights@2"
    assert main(toy(tmp_path, graph, "run.iterations=5", "run.overlap=true", name="beside")) == 0
    assert main(toy(tmp_path, graph, "run.iterations=5", "run.overlap=false", name="serial")) == 0
    tensors = "checkpoints/000004/tensors.safetensors"
    assert (tmp_path / "beside" / tensors).read_bytes() == (tmp_path / "serial" / tensors).read_bytes()


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            ["data.train.source=file", "data.train.path=/nowhere/problems.jsonl"],
            ["/nowhere/problems.jsonl", "does not exist"],
        ),
        (["model.path=/nowhere"], ["/nowhere"]),
        (["model.path={empty}"], ["{empty}", "tokenizer"]),
        (["run.root=/proc/nowhere"], ["/proc/nowhere"]),
        (["run.device=tpu"], ["run.device: expected auto, cpu, cuda or cuda:N, got 'tpu'"]),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, override: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text('{"model_type": "qwen2"}')
    filled = [o.replace("{empty}", str(empty)) for o in override]
    assert main(toy(tmp_path, "run.iterations=1", *filled)) == 2
    text = errors(capsys)
    assert all(part.replace("{empty}", str(empty)) in text for part in parts), text


def test_recipe_files_that_are_not_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "configs" / "recipe"
    folder.mkdir(parents=True)
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "open.yaml").write_text("# @package _global_\ndefaults: [toy_grpo\nx: [")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "recipe=bytes", "--check"]) == 2
    assert "can't decode byte 0xff" in errors(capsys)
    assert main(["train", "recipe=open", "--check"]) == 2
    assert "open.yaml" in errors(capsys)
    assert main(["graph", "--list"]) == 0


def test_a_missing_gpu_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*toy(tmp_path), "run.device=cuda"]) == 2
    assert "torch sees no CUDA device here" in errors(capsys)


@pytest.mark.parametrize(("traced", "expected"), [(False, ""), (True, "own end\n")])
def test_a_command_ends_before_python_collects_unless_something_traces_it(traced, expected):
    code = f"""
import atexit, sys
atexit.register(print, "own end")  # before the command's, so called after it
if {traced}:
    sys.settrace(lambda *_: None)
from creditgraph.__main__ import main
from creditgraph.pipeline.app import cli
cli.main = lambda: atexit.register(print, "handler of the command") and 2
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "handler of the command\n" + expected, "")
