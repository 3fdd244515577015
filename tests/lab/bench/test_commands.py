"""The two commands, in this process."""

import json

import pytest

from creditgraph.pipeline.app.cli import main


def run(*arguments):
    return main([str(argument) for argument in arguments])


def write_run(folder, accuracies):
    folder.mkdir(parents=True)
    rows = []
    for i, accuracy in enumerate(accuracies):
        rows.append({"iteration": i, "engine/sampled_tokens": 100.0, "learner/steps": 1.0, "seconds/iteration": 1.0})
        rows[-1]["evaluator/accuracy"] = accuracy
    rows.append({"iteration": len(accuracies), "evaluator/accuracy": accuracies[-1] + 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_compare_reports_the_runs_there_are(tmp_path, capsys):
    for seed in (0, 1):
        write_run(tmp_path / f"grpo-s{seed}", [0.2, 0.3, 0.4])
        write_run(tmp_path / f"srpo-s{seed}", [0.2, 0.5, 0.6 + 0.01 * seed])
    options = ("--methods", "srpo", "rrpo", "--seeds", 0, 1, "--tokens", 300, "--output", tmp_path, "--report")
    code = run("compare", *options)
    assert code == 0
    text = capsys.readouterr().out
    assert "Above grpo at equal sampled tokens: srpo." in text
    assert "Not tested, for want of two seeds that reach the budget as grpo's do: rrpo." in text
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["methods"]["srpo"]["accuracy"] == {"0": pytest.approx(0.7), "1": pytest.approx(0.71)}
    assert result["methods"]["rrpo"]["accuracy"] == {"0": None, "1": None}
    assert result["threshold"] == pytest.approx(0.2 + 0.75 * 0.3)
    assert (tmp_path / "compare.png").exists()
    assert (tmp_path / "table.md").read_text().startswith("| method ")


def test_compare_without_runs_says_what_is_missing(tmp_path, capsys):
    assert run("compare", "--methods", "srpo", "--output", tmp_path, "--report") == 2
    said = capsys.readouterr().err
    assert said == f"creditgraph compare: no run in {tmp_path} has been evaluated (train first, without --report).\n"


@pytest.mark.parametrize("tool", ["compare", "creditbench"])
def test_a_wrong_name_is_reported_and_nothing_runs(tmp_path, capsys, tool):
    assert run(tool, "--methods", "spro", "--output", tmp_path / "out") == 2
    assert f"{tool}: method 'spro': no recipe 'spro'. Did you mean 'srpo'?" in capsys.readouterr().err
    assert not (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize(("tool", "arguments"), [("creditbench", ["--samples", "7"]), ("compare", ["--jobs", "0"])])
def test_impossible_numbers_are_refused(capsys, tool, arguments):
    assert run(tool, *arguments) == 2
    assert f"{tool}: expected --" in capsys.readouterr().err


def test_creditbench_writes_table_result_and_figure(tmp_path, capsys):
    settings = ("--set", "prompts.batch=2", "--set", "data.train.size=40")
    options = ("--methods", "drgrpo", "--seeds", 0, "--samples", 2, *settings, "--output", tmp_path)
    code = run("creditbench", *options)
    assert code == 0
    assert "| drgrpo      |    given |" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["methods"]) == ["true_values", "grpo", "drgrpo"]
    assert result["settings"]["samples"] == 2
    assert (tmp_path / "creditbench.png").exists()
