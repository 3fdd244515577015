"""`creditgraph check` runs a component twice: what reads well and runs badly is reported under its own name."""

import re

import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.trial import try_component
from creditgraph.pipeline.core.registry import load_class


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("Crashes", r"\.run raises ZeroDivisionError: .* \(trial_toys\.py, line \d+\)\."),
        ("NaN", r"\.run: output 'credit': (\d+) of \1 values of advantage are not finite\."),
        ("Unseeded", r"\.run: two runs with the same seed differ in 'credit\.advantage'; draw from .*"),
        ("AlsoUnseeded", r"\.run: two runs with the same seed differ in 'credit\.advantage'; draw from .*"),
        (
            "RowTensors",
            r"\.run: Credit\.advantage: expected a Jagged with one value per response token, got a Tensor\. .*",
        ),
        ("ShortRows", r"\.run: output 'credit': advantage has 16 values in its rows; expected one per response .*"),
        ("FewerRows", r"\.run: output 'credit' has 3 rows that are not the 16 of 'trajectories'; expected .*"),
        ("Nothing", r"\.run: run returned None; expected its declared outputs credit\. .*"),
    ],
)
def test_a_component_that_runs_badly_gets_a_sentence_under_its_name(
    name: str, finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"trial_toys:{name}"]) == 1
    captured = capsys.readouterr()
    said = [line for line in captured.out.splitlines() if re.fullmatch(f"- {name}{finding}", line)]
    assert said, captured.out
    assert len(captured.out.splitlines()) <= 5
    assert "Traceback" not in captured.err


def test_a_component_that_runs_well_is_said_to_have_run(capsys: pytest.CaptureFixture[str]) -> None:
    cls = load_class("trial_toys:Fine")
    assert try_component(cls, "trial_toys:Fine", {}).findings == []
    assert try_component(cls, "trial_toys:Fine", {}).note == "run twice on 16 rows of recipe=toy_grpo"
    assert main(["check", "trial_toys:NeedsSetting", "-s", "strength=2"]) == 0
    assert "(run twice on 16 rows of recipe=toy_grpo)" in capsys.readouterr().out
    assert main(["check", "trial_toys:NeedsSetting"]) == 0
    assert "not run: strength: missing; expected float. Give settings with -s" in capsys.readouterr().out


# Each reads another payload, so that every recipe of the trial is used.
@pytest.mark.parametrize(
    "use",
    [
        "advantage.redistribute",
        "localizer.self",
        "reviser.compare",
        "verifier.exact",
        "buffer.merge",
        "learner.hf",
        "advantage.information_gain",
        "expander.turn_reset",
        "sampler.turn_tree",
    ],
)
def test_shipped_components_pass(use: str) -> None:
    trial = try_component(load_class(use), use, {})
    assert trial.findings == []
    assert trial.note.startswith("run twice ")
