"""Functions that take values: right GAE has no false alarm, and each error of it is found and named."""

import functools

import critic_bugs
import pytest

from creditgraph.pipeline.app.audit.audit import failures, of_advantages, run_checks
from creditgraph.pipeline.app.audit.batch import make
from creditgraph.pipeline.app.audit.critic import BATCHES, _by_row, gae
from creditgraph.pipeline.app.audit.problems import PROBLEMS
from creditgraph.pipeline.app.audit.targets import advantage_function


@functools.cache
def of(function):
    return run_checks(advantage_function(function, function.__name__, {}, {}), of_advantages())


def test_gae_by_hand():
    # γ .5, λ .5: δ₁ = 1 − .4 = .6; δ₀ = 0 + .5 · .4 − .2 = 0; A₁ = .6, A₀ = 0 + .25 · .6 = .15.
    batch = make([1.0], [0], lengths=[2], values=[[0.2, 0.4]])
    assert _by_row(batch, gae, 0.5, 0.5)[0].tolist() == pytest.approx([0.15, 0.6])


@pytest.mark.parametrize("function", critic_bugs.RIGHT, ids=lambda f: f.__name__)
def test_right_functions_of_values_pass(function):
    results = of(function)
    wanted = {"other_groups", "copies"} if function is critic_bugs.whitened else set()  # whitening is over the batch
    assert {r.check.name for r in failures(results)} == wanted
    found = {r.check.name: r.finding for r in results}
    if function is not critic_bugs.over_baseline:
        assert found["critic_gae"].message == "GAE with γ 0.9, λ 0.8"
    assert found["critic_baseline"].verdict == "pass"
    assert found["gradient_chain"].verdict == "pass"


def test_whitening_is_declared_in_one_word():
    (likely,) = {r.finding.likely for r in failures(of(critic_bugs.whitened))}
    assert likely == "this is GAE, whitened over the batch. If that is wanted: --declare whitening"


def test_a_mask_of_integers_is_given_where_booleans_are_refused():
    first = of(critic_bugs.whitened)[0].finding.message
    assert "gamma=1.0, lam=0.95" in first
    assert "response_mask as int64" in first


@pytest.mark.parametrize("function", critic_bugs.WRONG, ids=lambda f: f.__name__)
def test_errors_of_gae_are_named(function):
    found = {r.check.name: r.finding for r in failures(of(function))}
    assert critic_bugs.WRONG[function] in found["critic_gae"].message
    assert {f.likely for f in found.values()} == {found["critic_gae"].likely}
    assert found["critic_gae"].example["batch"] == BATCHES[0].shown()


@pytest.mark.parametrize("function", critic_bugs.ELSEWHERE, ids=lambda f: f.__name__)
def test_what_goes_wrong_at_observations_and_in_padding(function):
    found = {r.check.name: r.finding for r in failures(of(function))}
    assert critic_bugs.ELSEWHERE[function] in found


def test_true_values_of_a_problem():
    # p(a = 0) = σ(.5), then p(b = 1 | 0) = σ(−.6): V before token 1 after action 0 is the latter, 0 after action 1.
    chain = next(problem for problem in PROBLEMS if problem.name == "chain")
    values = [chain.values(i, False) for i in range(4)]
    assert values[0] == pytest.approx([0.62246 * 0.35434, 0.35434], abs=1e-5)
    assert values[3] == pytest.approx([0.62246 * 0.35434, 0.0], abs=1e-5)
    assert chain.values(0, False, 1.0) != values[0]
