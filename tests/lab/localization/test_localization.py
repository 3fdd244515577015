"""The command, on records by hand and on a real run."""

import json

import pytest
from failures_by_hand import Reset

from creditgraph.pipeline.run.metrics import read_metrics

# Deviations −1, 0, +2; suffixes 1 of 2, 1 of 1 (one is invalid), 0 of 2.
RESETS = [Reset(3, 2, (True, False)), Reset(3, 3, (True, None)), Reset(2, 4, (False, False))]


def test_records_by_hand(make_run, localization):
    run = make_run(RESETS, iterations=2)
    code, result, _ = localization(run)
    assert code == 0
    assert (result["truth"], result["iterations"], result["failures"], result["labelled"]) == ("oracle", 2, 6, 6)
    assert (result["clean"]["count"], result["exact"]["count"], result["clean"]["total"]) == (4, 2, 6)
    assert result["deviations"] == {"-1": 2, "0": 2, "2": 2}
    kinds = {row["resets"]: row for row in result["corrections"]}
    assert (kinds["clean"]["suffixes"]["count"], kinds["clean"]["suffixes"]["total"]) == (4, 6)
    assert (kinds["erroneous"]["suffixes"]["count"], kinds["erroneous"]["suffixes"]["total"]) == (0, 4)
    assert (kinds["clean"]["corrected"]["count"], kinds["clean"]["corrected"]["total"]) == (4, 4)
    assert kinds["+3"]["suffixes"]["share"] is None
    assert result["gradient_signal"]["suffix"]["responses"] == 12
    rows = [json.loads(line) for line in (run / "localization" / "failures.jsonl").read_text().splitlines()]
    assert [(r["localized_step"], r["first_error"], r["correct_suffixes"]) for r in rows[:3]] == [
        (2, 3, 1),
        (3, 3, 1),
        (4, 2, 0),
    ]
    assert (run / "localization" / "localization.png").read_bytes().startswith(b"\x89PNG")


def test_tables_and_figure(make_run, localization, tmp_path):
    code, printed, _ = localization(make_run(RESETS), "-o", tmp_path / "out", "--format", "svg", json_output=False)
    assert code == 0
    assert "by_hand: 3 failures of 1 recorded iterations; true first error from oracle: 3 labelled" in printed
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()]
    assert ["clean: at or before the first error", "2 of 3", ".667", ".208–.939"] in [line[:4] for line in lines]
    assert ["−1", "1", "1 of 2", ".500", ".095–.905", "1 of 1", "1.000", ".207–1.000"] in lines
    assert ["+1", "0", "0 of 0", "–", "–", "0 of 0", "–", "–"] in lines
    assert "<svg" in (tmp_path / "out" / "localization.svg").read_text()


def test_a_folder_that_cannot_be_made(make_run, localization, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, error = localization(make_run(RESETS), "-o", tmp_path / "file" / "out")
    assert code == 2
    assert f"{tmp_path}/file/out: cannot be written (Not a directory)" in error


def test_labels_are_filled_into_the_file_that_the_command_writes(make_run, localization):
    run = make_run(RESETS, oracle=False)
    code, _, error = localization(run)
    assert code == 2
    assert "the true first errors of this task are not known" in error
    file = run / "localization" / "failures.jsonl"
    assert str(file) in error
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["first_error"] for row in rows] == [None] * 3
    assert rows[0]["steps"][2].split() == ["s3", "</thought>"]
    rows[0]["first_error"] = 1
    labelled = run / "labels.jsonl"
    labelled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, result, _ = localization(run, "--labels", labelled)
    assert code == 0
    assert (result["labelled"], result["unlabelled"], result["deviations"]) == (1, {"no label": 2}, {"1": 1})


def test_limits_and_mistakes(make_run, localization, tmp_path):
    run = make_run(RESETS, iterations=3)
    assert localization(run, "--limit", 3)[1]["failures"] == 3
    for arguments, message in (
        ((run, "--limit", 0), "--limit 0: expected at least 1"),
        ((run, "--min-words", -1), "--min-words -1: expected 0"),
        ((run, "--judge-model", "m"), "a judge also needs --judge, the URL of its server"),
        ((run, "--judge", "x", "--judge-model", "m"), "--judge x: expected the server's base URL"),
        ((tmp_path / "none",), "no such run directory"),
    ):
        code, _, error = localization(*arguments)
        assert code == 2
        assert message in error


def test_what_is_not_recorded_is_noted(make_run, localization):
    run = make_run(RESETS, iterations=2)
    (run / "record" / "sampler.failures" / "000001.parquet").unlink()
    _, result, _ = localization(run)
    assert result["failures"] == 3
    assert "the failures of iteration 1 are not recorded, so its resets are left out" in result["notes"]
    for file in (run / "record" / "localizer.errors").iterdir():
        file.unlink()
    code, result, _ = localization(run)
    assert code == 0
    assert "truth" not in result
    assert list(result["gradient_signal"]) == ["base"]
    assert any("no localised failure is recorded" in note for note in result["notes"])
    for file in (run / "record" / "advantage.credit").iterdir():
        file.unlink()
    code, _, error = localization(run)
    assert code == 2
    assert "neither localised failures nor credit with log-probs are recorded" in error


def test_a_real_run_agrees_with_the_metrics_that_it_logged(toy_run, localization):
    code, result, _ = localization(toy_run)
    assert code == 0
    logged = [row for row in read_metrics(toy_run / "metrics.jsonl") if row.get("resets/failures")]
    failures = [row["resets/failures"] for row in logged]
    assert result["failures"] == sum(failures) > 5

    def total(name):
        return sum(row[f"resets/{name}"] * count for row, count in zip(logged, failures, strict=True))

    assert result["clean"]["count"] == pytest.approx(total("clean"))
    assert result["exact"]["count"] == pytest.approx(total("exact"))
    clean, erroneous = result["corrections"][:2]
    assert clean["suffixes"]["count"] + erroneous["suffixes"]["count"] == pytest.approx(4 * total("correction"))
    assert clean["corrected"]["count"] + erroneous["corrected"]["count"] == pytest.approx(total("corrected"))
    assert sum(result["deviations"].values()) == result["failures"]
    assert sum(row["failures"] for row in result["corrections"][2:]) == result["failures"]
    signal = result["gradient_signal"]
    assert signal["suffix"]["tokens"] == sum(signal["suffix"]["by_position"]["tokens"])
    assert signal["base"]["mean"] > 0
