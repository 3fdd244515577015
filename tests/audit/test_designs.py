"""Known designs are recognised and declared in one word; truncated rows; the likely fault is named."""

import numpy as np
import pytest

from creditgraph.pipeline.app.audit.audit import all_checks, failures, known_names, run_checks, table
from creditgraph.pipeline.app.audit.contract import CONTRACT
from creditgraph.pipeline.app.audit.designs import WORDS, recognised
from creditgraph.pipeline.app.audit.gradient import GRADIENT
from creditgraph.pipeline.app.audit.metamorphic import METAMORPHIC
from creditgraph.pipeline.app.audit.targets import advantage_function


def by_group(rewards, groups, form):
    out = np.zeros_like(rewards)
    for group in np.unique(groups):
        out[groups == group] = form(rewards[groups == group])
    return out


def centred(rewards, groups):
    return by_group(rewards, groups, lambda r: r - r.mean())


def population(rewards: np.ndarray, groups: np.ndarray):
    return by_group(rewards, groups, lambda r: (r - r.mean()) / (r.std() + 1e-4))


def unbiased(rewards: np.ndarray, groups: np.ndarray):
    return by_group(rewards, groups, lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-4 if len(r) > 1 else 1.0))


def leave_one_out(rewards: np.ndarray, groups: np.ndarray):
    return by_group(rewards, groups, lambda r: (r - r.mean()) * len(r) / max(len(r) - 1, 1))


def opo(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray):
    out = np.zeros_like(rewards)
    for group in np.unique(groups):
        rows = groups == group
        out[rows] = rewards[rows] - (lengths[rows] * rewards[rows]).sum() / lengths[rows].sum()
    return out


def batch_deviation(rewards: np.ndarray, groups: np.ndarray):
    return centred(rewards, groups) / (rewards.std() + 1e-4)


def reinforce_plus_plus(rewards: np.ndarray, mask: np.ndarray):
    tokens = np.repeat(rewards[:, None], mask.shape[1], axis=1)
    return (tokens - tokens[mask].mean()) / (tokens[mask].std(ddof=1) + 1e-8) * mask


def maxrl(rewards: np.ndarray, groups: np.ndarray):
    return by_group(rewards, groups, lambda r: (r - r.mean()) / r.mean() if r.mean() > 0 else 0 * r)


def no_baseline(rewards: np.ndarray):
    return rewards


def target(function):
    return advantage_function(function, function.__name__, {}, {})


@pytest.mark.parametrize(
    ("function", "words", "declare"),
    [
        (centred, "reward minus the mean of its group", ""),
        (population, "the deviation of the group (n)", ""),
        (unbiased, "the deviation of the group (n − 1)", ""),
        (leave_one_out, "RLOO", ""),
        (opo, "OPO", ""),
        (batch_deviation, "over a deviation of the batch", "batch_deviation"),
        (reinforce_plus_plus, "REINFORCE++", "reinforce++"),
        (maxrl, "MaxRL", "maxrl"),
        (no_baseline, "no baseline is subtracted", "no_baseline"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
def test_a_design_is_recognised_and_one_word_declares_it(function, words, declare):
    design = recognised(target(function))
    assert words in design.words
    assert design.declare == declare
    results = run_checks(target(function), (*CONTRACT, *METAMORPHIC))
    bad = failures(results)
    assert {r.check.name for r in bad} <= known_names([declare] if declare else [])
    assert words in results[0].finding.message
    if declare:
        wanted = {f"these are {design.words}. If that is wanted: --declare {declare}"}
        assert {r.finding.likely for r in bad} == wanted


def test_a_word_declares_no_more_than_the_design_fails():
    checks = {check.name for check in all_checks()}
    assert all(names < checks for names in WORDS.values())

    def turned_round(rewards: np.ndarray, mask: np.ndarray):
        return -reinforce_plus_plus(rewards, mask)

    results = run_checks(target(turned_round), (*METAMORPHIC, *GRADIENT), known_names(["reinforce++"]))
    assert {"monotone", "gradient_bandit"} <= {r.check.name for r in failures(results)}


def cut(rewards, groups, truncated, left_out):
    out = np.zeros_like(rewards)
    for group in np.unique(groups):
        rows = groups == group
        counted = rows & ~truncated if left_out else rows
        if counted.any():
            out[rows] = rewards[rows] - rewards[counted].mean()
    return np.where(truncated, 0.0, out)


def truncated_in_baseline(rewards: np.ndarray, groups: np.ndarray, truncated: np.ndarray):
    return cut(rewards, groups, truncated, left_out=False)


def truncated_left_out(rewards: np.ndarray, groups: np.ndarray, truncated: np.ndarray):
    return cut(rewards, groups, truncated, left_out=True)


def penalty(rewards: np.ndarray, groups: np.ndarray, truncated: np.ndarray):
    return centred(rewards - 0.5 * truncated, groups)


def unread(rewards: np.ndarray, groups: np.ndarray, truncated: np.ndarray):
    return centred(rewards, groups)


def first_token_lost(rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray):
    return np.where(mask, centred(rewards, groups)[:, None], 0.0) * (np.arange(mask.shape[1]) > 0)


def sign(rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray):
    return np.where(mask, -centred(rewards, groups)[:, None], 0.0)


def by_place(rewards: np.ndarray, groups: np.ndarray):
    return centred(rewards, np.arange(len(rewards)) // 3)


FAULTS = {
    truncated_in_baseline: ("truncated_rows", "a row without credit of its own stays in the mean of its group"),
    unread: ("truncated_rows", ""),
    first_token_lost: (
        "gradient_bandit",
        "the first token of a row never gets credit: are advantages or the mask shifted",
    ),
    sign: ("monotone", "is a sign turned round?"),
    by_place: ("row_order", "are groups taken from the places of rows, or is the batch one group?"),
}


@pytest.mark.parametrize("function", FAULTS, ids=lambda f: f.__name__)
def test_the_likely_fault_is_said_first(function):
    check, words = FAULTS[function]
    results = run_checks(target(function), (*METAMORPHIC, *GRADIENT[:1]))
    found = {r.check.name: r.finding for r in failures(results)}
    assert words in found[check].likely
    if words:
        lines = table(results).splitlines()
        assert lines[1].startswith("  likely: ")
        assert words in lines[1]


@pytest.mark.parametrize("function", [truncated_left_out, penalty], ids=lambda f: f.__name__)
def test_right_uses_of_truncated_rows_pass(function):
    results = {r.check.name: r.finding for r in run_checks(target(function), METAMORPHIC)}
    assert results["truncated_rows"].verdict == "pass"


def only_the_last_turn_learns(rewards: np.ndarray, turns: np.ndarray):
    """Earlier turns have the return 0, of which whitening makes a constant that no reward moves."""
    returns = np.where(turns == turns.max(1, keepdims=True), rewards[:, None], 0.0)
    inside = turns >= 0
    return (returns - returns[inside].mean()) / (returns[inside].std() + 1e-8) * inside


def test_a_constant_is_no_credit_of_a_turn():
    found = {r.check.name: r.finding for r in run_checks(target(only_the_last_turn_learns), METAMORPHIC)}
    assert found["credited_turns"].verdict == "fail"


Floats = np.ndarray


def test_annotations_that_are_strings_are_resolved():
    def function(rewards: "Floats", groups: "Floats"):
        assert isinstance(rewards, np.ndarray)
        return centred(rewards, groups)

    assert run_checks(target(function), CONTRACT[:1])[0].finding.verdict == "pass"


def test_gradients_are_shown_by_state():
    found = {r.check.name: r.finding for r in run_checks(target(sign), GRADIENT)}["gradient_chain"]
    assert list(found.example["true"]) == ["token 0", "token 1 after action 0", "token 1 after action 1"]
    assert found.example["expected"]["token 0"][0] < 0 < found.example["true"]["token 0"][0]
