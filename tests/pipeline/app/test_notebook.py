"""The Python API: compose, step, change a node, train, read; batches as text, HTML and DataFrames."""

import gc
import runpy
import sys
import weakref
from pathlib import Path

import pytest
import torch
import yaml

import creditgraph
from creditgraph.pipeline.app.notebook import show
from creditgraph.pipeline.core.errors import ConfigError, GraphError, MissingExtraError, RunError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit

SMALL = ["prompts.batch=3", "sampler.group_size=4", "data.train.size=50", "evaluator.num_problems=2"]


@pytest.fixture(scope="module")
def session():
    with creditgraph.compose("toy_grpo", *SMALL).session() as session:
        yield session


@pytest.fixture(scope="module")
def out(session):
    return session.step()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return creditgraph.train(
        "toy_srpo", *SMALL[:1], *SMALL[3:], "run.record.every=1", iterations=2, root=root, name="r"
    )


def test_every_public_name_is_listed_and_loads() -> None:
    names = dir(creditgraph)
    assert {"train", "compose", "read", "testing", "Component", "group_advantage", "Run", "Session"} <= set(names)
    assert all(getattr(creditgraph, name) is not None for name in names)


def test_on_windows_one_sentence_says_where_it_runs(monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match=r"^creditgraph runs on Linux, and not on Windows itself; install it in WSL"):
        runpy.run_path(creditgraph.__file__)


def test_a_step_gives_outputs_by_wire_and_metrics(out) -> None:
    assert len(out["sampler.trajectories"]) == len(out["advantage.credit"]) == 12
    assert out["learner.weights"].version == 1
    assert out.metrics["sampler/sampled_tokens"] == len(out["sampler.trajectories"].response_tokens.values)
    with pytest.raises(KeyError, match=r"Did you mean 'advantage.credit'\?"):
        out["advantage.credits"]


def test_again_changes_the_credit_of_the_same_rollouts_and_the_next_step_goes_on(session, out) -> None:
    again = session.again("advantage.normalize=mean")
    assert again["sampler.trajectories"] is out["sampler.trajectories"]
    assert "learner.weights" not in again  # its step is made
    reward = out["rewards.rewards"].value
    expected = reward - reward.reshape(3, 4).mean(1).repeat_interleave(4)
    got = torch.stack([row[0] for row in again["advantage.credit"].advantage.rows()])
    torch.testing.assert_close(got, expected)
    following = session.step()
    assert following.iteration == 1
    assert following["learner.weights"].version == 2
    assert following["sampler.trajectories"].policy_version.tolist() == [1] * 12
    with pytest.raises(ConfigError, match=r"again: ~nodes\.evaluator ~evaluator changes the nodes"):
        session.again("~nodes.evaluator", "~evaluator")


def test_steps_are_those_of_a_run(tmp_path) -> None:
    with creditgraph.compose("toy_grpo", *SMALL).session() as session:
        steps = [session.step() for _ in range(2)]
    made = creditgraph.train("toy_grpo", *SMALL, "run.record.every=1", iterations=2, root=tmp_path, name="r")
    for step in steps:
        recorded = made.read("advantage.credit", step.iteration)
        assert recorded.advantage.equal(step["advantage.credit"].advantage)


def test_rollouts_as_a_table(out, run) -> None:
    table = out.rollouts()
    assert len(table) == 12
    row = table.iloc[0]
    assert len(row.tokens) == len(row.credit)
    assert "".join(row.tokens).split() == row.response.split()
    assert row.prompt.startswith("<solve>")
    table = run.rollouts()
    assert sorted(set(table.iteration)) == [0, 1]
    assert {"prompt", "response", "reward", "correct", "credit", "uid", "parent"} <= set(table.columns)
    assert set(table.node) == {"sampler", "expander"}
    learned = table[table.credit.notna()]
    assert (learned.credit.map(len) == learned.tokens.map(len)).all()
    assert len(run.rollouts([1])) < len(table)
    assert "rewards/mean" in run.metrics().columns


def test_reading_a_run_loads_no_code_that_it_names(run, tmp_path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    config["nodes"]["advantage"]["use"] = f"{tmp_path}/evil.py:Evil"
    (tmp_path / "evil.py").write_text("open('ran', 'w')")
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    (copy / "record").symlink_to(run.path / "record")
    assert len(creditgraph.read(copy).rollouts()) == len(run.rollouts())
    assert not Path("ran").exists()
    with pytest.raises(RunError, match="no such run directory"):
        creditgraph.read(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"recorded iterations: 0-1"):
        run.read("advantage.credit", 7)
    with pytest.raises(RunError, match=r"Did you mean 'advantage.credit'\?"):
        run.read("advantage.credi")


def test_a_wrong_setting_is_one_sentence() -> None:
    with pytest.raises(GraphError, match=r"Here it is called sampler\.group_size"):
        creditgraph.compose("toy_grpo", "sampler.num_generations=4")
    with pytest.raises(ConfigError, match="no recipe named 'toy_grop'"):
        creditgraph.compose("toy_grop")


def test_a_batch_has_a_short_line_and_a_table(out) -> None:
    credit = out["advantage.credit"]
    tokens = len(credit.advantage.values)
    assert repr(credit) == f"Credit(12 rows, {tokens:,} tokens of advantage.credit)"
    table = out["rewards.rewards"].to_pandas()
    assert list(table.columns) == ["uid", "value", "correct", "valid", "detail"]
    assert table.value.tolist() == out["rewards.rewards"].value.tolist()


def test_without_pandas_one_sentence_says_what_to_install(out, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'creditgraph\[train\]'"):
        out["rewards.rewards"].to_pandas()
    with pytest.raises(MissingExtraError, match="rollouts"):
        out.rollouts()


def test_credit_is_coloured_as_in_the_report(out) -> None:
    credit = Credit(
        uid=torch.tensor([1, 2]),
        advantage=Jagged.from_rows([[0.0, 0.0], [1.0, -0.5]], torch.float32),
        mask=Jagged.from_rows([[True, True], [True, True]]),
    )
    show.show_with(credit, lambda batch: {1: ["a", "b"], 2: ["<x>", "y\n"]})
    said = credit._repr_html_()
    # Largest |credit| is 1: +1 is level 5 of 5, −.5 is level ceil(2.5) = 3.
    assert f"background:{show.colours()['p5']}" in said
    assert f"background:{show.colours()['n3']}" in said
    assert "&lt;x&gt;" in said  # text of a model is never markup
    assert said.index("&lt;x&gt;") < said.index("ab")  # rows with credit come first
    css = (show.ASSETS / "report.css").read_text()
    assert all(f"--{name}: {colour};" in css for name, colour in show.colours().items())
    assert set(show.colours()) == {"plus", "minus", *(f"{sign}{i}" for sign in "pn" for i in range(1, 6))}


def test_a_batch_for_tests_is_what_check_tries_a_component_on() -> None:
    first = creditgraph.testing.batch("toy_srpo")
    second = creditgraph.testing.batch("toy_srpo")
    assert "learner.weights" not in first
    assert {"sampler.failures", "localizer.errors", "expander.trajectories"} <= set(first)
    for name in ("expander.trajectories", "sampler.failures"):
        assert first[name].text == second[name].text


def test_what_a_batch_is_shown_with_does_not_keep_it() -> None:
    out = creditgraph.testing.batch()
    gone = weakref.ref(out["sampler.trajectories"])
    del out
    gc.collect()
    assert gone() is None
