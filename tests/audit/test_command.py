"""`creditgraph audit` as people type it: exit codes, output, and one sentence for each mistake."""

import json
import time

import numpy as np
import pytest

from creditgraph.pipeline.app.audit import contract
from creditgraph.pipeline.app.cli import main

GOOD = """
import numpy as np

def advantage(rewards: np.ndarray, groups: np.ndarray, scale: float = 1.0):
    out = np.zeros_like(rewards)
    for g in np.unique(groups):
        out[groups == g] = rewards[groups == g] - rewards[groups == g].mean()
    return scale * out
"""
BATCH_MEAN = """
import numpy as np

def advantage(rewards: np.ndarray, groups: np.ndarray):
    return rewards - rewards.mean()
"""


def written(tmp_path, text):
    file = tmp_path / "theirs.py"
    file.write_text(text)
    return f"{file}:advantage"


def told(capsys, *arguments):
    """Exit code, and what is on the terminal."""
    code = main(["audit", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_right_credit_exits_with_zero(tmp_path, capsys):
    code, out, _ = told(capsys, written(tmp_path, GOOD), "--time")
    assert code == 0
    assert "✓ row_order" in out
    assert "called with rewards, groups as numpy arrays" in out
    assert "✗" not in out
    assert "0 fail" not in out
    assert " s  " in out.splitlines()[-1]


def test_wrong_credit_exits_with_one_and_shows_the_smallest_batch(tmp_path, capsys):
    target = written(tmp_path, BATCH_MEAN)
    code, out, _ = told(capsys, target, "--json")
    rows = {row["check"]: row for row in json.loads(out)}
    assert code == 1
    found = rows["other_groups"]
    assert found["verdict"] == "fail"
    assert found["layer"] == "metamorphic"
    # Two groups of two rows, each of one token, and one reward that is not 0, is the smallest there is.
    batch = found["example"]["batch"]
    assert len(batch) == 4
    assert [row["tokens"] for row in batch] == [1, 1, 1, 1]
    assert found["size"] > 0


def test_a_declared_failure_exits_with_zero(tmp_path, capsys):
    target = written(tmp_path, BATCH_MEAN)
    _, out, _ = told(capsys, target, "--json")
    names = ",".join(row["check"] for row in json.loads(out) if row["verdict"] == "fail")
    code, out, _ = told(capsys, target, "--declare", names)
    assert code == 0
    assert "≈ other_groups" in out
    assert "declared on the command line" in out


def test_a_file_of_known_failures_lets_only_new_ones_fail(tmp_path, capsys):
    target = written(tmp_path, BATCH_MEAN)
    known = tmp_path / "known.yaml"
    known.write_text(
        f"{target}:\n  other_groups: one baseline for all\n  uneven_groups: the same\n  reward_shift: the same\n"
        "  monotone: mended last week\n'*': [copies]\n"
    )
    code, out, err = told(capsys, target, "--layer", "metamorphic", "--known", str(known))
    assert code == 1
    assert [line.split()[1] for line in out.splitlines() if line.startswith("  ✗")] == ["no_signal"]
    assert "one baseline for all" in out
    assert f"{target}: monotone is listed as a known failure and passes now; remove it" in err
    known.write_text(known.read_text().replace("monotone: mended last week", "no_signal: the same"))
    code, _, err = told(capsys, target, "--layer", "metamorphic", "--known", str(known))
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: [Errno 2] No such file"),
        ("ÿ: [copies]\n", "cannot be read: 'utf-8' codec"),
        ("- other_groups\n", "expected target: {check: reason}, got list"),
        ("a: other_groups\n", "a: expected {check: reason} or a list, got 'other_groups'"),
        ("a: [other_group]\n", "no such check. Did you mean 'other_groups'?"),
        ("a: [\n", "cannot be read: while parsing"),
        ("a: [copies]\nb: [copies]\na: [no_signal]\n", "found duplicate key a"),
    ],
)
def test_a_wrong_file_of_known_failures_gets_one_sentence(tmp_path, capsys, text, sentence):
    known = tmp_path / "known.yaml"
    if text is not None:
        known.write_text(text, encoding="latin-1")
    code, _, err = told(capsys, written(tmp_path, GOOD), "--known", str(known))
    assert code not in (0, 1)
    assert sentence in err
    assert "Traceback" not in err


def test_a_test_of_ones_own_calls_the_audit(tmp_path):
    from creditgraph.audit import check

    assert {r.finding.verdict for r in check(written(tmp_path, GOOD))} <= {"pass", "not applicable"}

    def credit(returns: np.ndarray, groups: np.ndarray):
        return returns - returns.mean()

    with pytest.raises(AssertionError, match=r"✗ other_groups(.|\n)*expected: Other prompts' rewards do not matter"):
        check(credit, bind={"returns": "rewards"})
    names = ["other_groups", "uneven_groups", "reward_shift", "no_signal"]
    known = tmp_path / "known.yaml"
    known.write_text(f"{__name__}:{credit.__qualname__}: [{', '.join(names[:2])}]\n")
    results = check(credit, bind={"returns": "rewards"}, declare=names[2:], known=known)
    assert {r.check.name for r in results if r.finding.verdict == "declared"} == set(names)


def test_how_a_trainer_weights_micro_batches_is_declared(tmp_path, capsys):
    body = (
        "def advantage(logprobs, old_logprobs, advantages, mask):\n"
        "    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()\n"
        "    return -(ratio * advantages * mask).sum() / mask.sum()\n"
    )
    target = written(tmp_path, "import torch\n" + body)
    code, out, _ = told(capsys, target, "--json")
    found = {row["check"]: row for row in json.loads(out)}["loss_cut"]
    assert (code, found["verdict"]) == (0, "pass")
    assert "if they are weighted by their tokens" in found["message"]
    code, out, _ = told(capsys, target, "--json", "--accumulate", "mean")
    found = {row["check"]: row for row in json.loads(out)}["loss_cut"]
    assert (code, found["verdict"]) == (1, "fail")
    assert "they would have to be weighted by their tokens" in found["message"]
    assert found["likely"] == "each micro-batch is divided by its own count, not by that of the whole batch"
    assert found["example"]["batch"][1]["advantages"] == [-0.333] * 4


def test_an_attribute_of_the_function_declares_too(tmp_path, capsys):
    text = BATCH_MEAN + "\nadvantage.audit_declares = {'uneven_groups': 'one baseline for all, as in REINFORCE'}\n"
    code, out, _ = told(capsys, written(tmp_path, text), "--declare", "other_groups,reward_shift,no_signal,copies")
    assert code == 0
    assert "one baseline for all, as in REINFORCE" in out


def test_a_page_draws_the_counter_example(tmp_path, capsys):
    page = tmp_path / "audit.html"
    told(capsys, written(tmp_path, BATCH_MEAN), "--html", str(page))
    text = page.read_text()
    assert text.lower().startswith("<!doctype html>")
    assert "http://" not in text
    assert "https://" not in text
    assert "other_groups" in text
    assert "group 0, reward" in text
    assert "background: rgba(46,125,50" in text  # a positive advantage
    assert "background: rgba(198,40,40" in text  # a negative one


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--declare", "row_oder"], "no such check. Did you mean 'row_order'?"),
        (["--bind", "reward=rewards"], "has no parameter 'reward'. Did you mean 'rewards'?"),
        (["--bind", "rewards=reward"], "no such column. Did you mean 'rewards'?"),
        (["--bind", "rewards"], "expected name=column"),
        (["-s", "skale=1"], "has no parameter 'skale'. Did you mean 'scale'?"),
    ],
)
def test_a_wrong_option_gets_one_sentence(tmp_path, capsys, arguments, sentence):
    code, _, err = told(capsys, written(tmp_path, GOOD), *arguments)
    assert code not in (0, 1)
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def advantage(rewards, temperature): return rewards", "nothing is known of temperature"),
        ("def advantage(rewards): raise KeyError('uid')", "raised KeyError on two groups of two rows"),
        ("def advantage(rewards): return rewards[:2]", "expected advantages of shape [4] (a row each) or [4, 3]"),
        ("def advantage(rewards): return 'none'", "expected advantages as a tensor, an array or lists of numbers"),
        ("def advantages(rewards): return rewards", "has no function 'advantage'. Did you mean 'advantages'?"),
        ("import nothing_of_this_name", "importing it failed with ModuleNotFoundError"),
    ],
)
def test_a_function_that_cannot_be_audited_gets_one_sentence(tmp_path, capsys, body, sentence):
    code, _, err = told(capsys, written(tmp_path, body))
    assert code not in (0, 1)
    assert sentence in err
    assert "Traceback" not in err


def test_a_parameter_of_an_unknown_name_is_bound(tmp_path, capsys):
    target = written(tmp_path, GOOD.replace("rewards", "payoffs"))
    code, _, err = told(capsys, target)
    assert "--bind payoffs=COLUMN" in err
    code, out, _ = told(capsys, target, "--bind", "payoffs=rewards", "--layer", "metamorphic")
    assert code == 0
    assert "payoffs: rewards" in out


def test_a_function_that_hangs_is_ended(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(contract.limited.__wrapped__, "__defaults__", (0.3,))
    begin = time.perf_counter()
    code, _, err = told(capsys, written(tmp_path, "def advantage(rewards):\n    while True: pass"))
    assert code not in (0, 1)
    assert "took more than 0.3 s" in err
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize(
    ("line", "check", "message"),
    [
        ("return rewards / 0.0 * 0.0", "returns", "advantages are no numbers"),
        ("rewards -= rewards.mean(); return rewards", "inputs", "changes rewards in place"),
        ("return rewards + np.random.rand(len(rewards))", "repeats", "two calls with the same input differ by"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_broken_contracts(tmp_path, capsys, line, check, message):
    text = f"import numpy as np\ndef advantage(rewards: np.ndarray, groups: np.ndarray):\n    {line}\n"
    code, out, _ = told(capsys, written(tmp_path, text), "--json", "--layer", "gradient")
    found = {row["check"]: row for row in json.loads(out)}[check]
    assert code == 1
    assert found["verdict"] == "fail"
    assert message in found["message"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("return 3.0", "expected a loss as a torch tensor, got float"),
        ("return (logprobs * advantages)[:2]", "expected a scalar or a loss per token of shape [6, 4]"),
        ("raise ValueError('shapes')", "raised ValueError on six rows"),
    ],
)
def test_a_loss_that_cannot_be_audited_gets_one_sentence(tmp_path, capsys, line, sentence):
    code, _, err = told(capsys, written(tmp_path, f"def advantage(logprobs, advantages):\n    {line}\n"))
    assert code not in (0, 1)
    assert sentence in err


def test_a_random_loss_is_found(tmp_path, capsys):
    line = "return -(logprobs * advantages).sum() * torch.rand(())"
    text = f"import torch\ndef advantage(logprobs, advantages):\n    {line}\n"
    code, out, _ = told(capsys, written(tmp_path, text), "--json")
    found = {row["check"]: row for row in json.loads(out)}["loss_returns"]
    assert code == 1
    assert "two calls with the same input" in found["message"]


@pytest.mark.parametrize("line", ["os._exit(0)", "sys.exit(0)", "sys.exit()"])
def test_a_function_that_ends_the_process_is_no_success(tmp_path, capsys, line):
    body = f"import os, sys\ndef advantage(rewards, groups):\n    {line}\n"
    code, out, err = told(capsys, written(tmp_path, body))
    assert (code, out) == (2, "")
    assert "it ends the process" in err


def test_json_is_strict(tmp_path, capsys):
    body = "def advantage(rewards, groups):\n    return rewards / (rewards - rewards)\n"
    code, out, _ = told(capsys, written(tmp_path, body), "--json")

    def refuse(text):
        raise ValueError(text)

    rows = json.loads(out, parse_constant=refuse)
    assert code == 1
    assert rows
