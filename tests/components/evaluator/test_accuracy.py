"""Held-out accuracy: pass@k by hand and by listing, when it evaluates, fixed problems and seeds."""

from itertools import product

import pytest
import torch

from creditgraph.components.evaluator.accuracy import Accuracy, pass_at_k, sample_metrics
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.ranks import Ranks

DATA = {
    "eval": {
        "source": "chains",
        "size": 6,
        "seed": 3,
        "split": "eval",
        "difficulty": {"steps": [2, 3], "hard_facts": None},
    }
}


def test_pass_at_k_by_hand():
    # 1 of 4 right, 2 drawn: of the 6 pairs 3 hold it. 2 of 5 right, 3 drawn: 1 − C(3,3)/C(5,3) = 1 − 1/10.
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)
    assert pass_at_k(8, 0, 8) == 0
    assert pass_at_k(8, 1, 8) == 1


def test_pass_at_k_equals_listing_all_subsets(reference):
    for n, c, k in product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            assert pass_at_k(n, c, k) == pytest.approx(reference.pass_at_k(n, c, k), abs=1e-12)


def test_pass_at_one_is_the_mean_and_big_numbers_do_not_overflow():
    for c in (0, 1, 3, 999, 2000):
        assert pass_at_k(2000, c, 1) == pytest.approx(c / 2000)
    assert 0.99 < pass_at_k(100_000, 500, 1000) < 1
    assert [pass_at_k(64, 5, k) for k in (1, 2, 4, 8, 16, 32)] == sorted(
        pass_at_k(64, 5, k) for k in (1, 2, 4, 8, 16, 32)
    )


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)])
def test_impossible_counts_are_reported(n, c, k):
    with pytest.raises(ValueError, match="expected 1 ≤ k ≤ n and 0 ≤ c ≤ n"):
        pass_at_k(n, c, k)


def test_sample_metrics():
    assert sample_metrics([1, 0], 4) == {"mean_at_4": 0.125, "pass_at_2": pytest.approx(0.25), "pass_at_4": 0.5}
    assert sample_metrics([1, 0], 1) == {"mean_at_1": 0.5}
    assert sample_metrics([3], 6).keys() == {"mean_at_6", "pass_at_2", "pass_at_4", "pass_at_6"}


def _node(iteration=0, iterations=10, node_index=5, **settings):
    node = Accuracy(Accuracy.Config(**settings))
    node.setup(
        Context(node="evaluator", node_index=node_index, seed=1, iteration=iteration, iterations=iterations, data=DATA)
    )
    return node


def _greedy_right(context, n):
    return "right" if n == 0 else "wrong"


def test_greedy_first_then_samples(toolbox):
    node = _node(samples=2, num_problems=4)
    policy = toolbox.policy(_greedy_right)
    report = node.run(policy=policy, verifier=toolbox.verifier(lambda text: float(text == "right"))).report
    assert report.metrics == {"accuracy": 1.0, "problems": 4, "mean_at_2": 0.0, "pass_at_2": 0.0}
    assert node.context.metrics["rejected"] == 0
    assert report.metrics.items() <= node.context.metrics.items()
    assert node.context.metrics["sampled_tokens"] == (4 + 8) * 5  # a token per letter
    assert report.seconds["evaluation"] > 0
    greedy, sampled = policy.calls
    assert greedy.sampling.temperature == 0
    assert sampled.sampling.temperature == 1
    assert (len(greedy.seed), len(sampled.seed)) == (4, 8)


def test_a_second_attempt_is_judged_by_hand(toolbox):
    """Five problems: right twice, turned right, turned wrong, wrong twice, and right without room for a retry."""
    said = [("right", "right"), ("wrong", "right"), ("right", "wrong"), ("wrong", "wrong"), ("right", "")]
    answers = iter([first for first, _ in said] + [second for _, second in said])
    node = _node(attempt=2, num_problems=5)
    policy = toolbox.policy(lambda context, n: next(answers))
    node.run(policy=policy, verifier=toolbox.verifier(lambda text: float(text == "right")))
    shares = {
        name: node.context.metrics[name] for name in ("accuracy", "first_accuracy", "turned_right", "turned_wrong")
    }
    assert shares == {"accuracy": 0.4, "first_accuracy": 0.6, "turned_right": 0.2, "turned_wrong": 0.4}
    assert node.context.metrics["sampled_tokens"] == 5 * 5 + 4 * 5
    first, second = policy.calls
    assert first.sampling.temperature == second.sampling.temperature == 0
    assert not set(first.seed.tolist()) & set(second.seed.tolist())
    with pytest.raises(ValueError, match=r"attempt: expected 1 or 2, got 3"):
        Accuracy.Config(attempt=3)


def test_when_it_evaluates(toolbox):
    assert [i for i in range(11) if _node(i, every=4).due()] == [0, 4, 8, 10]
    assert [i for i in range(11) if _node(i, every=0).due()] == [0, 10]
    policy = toolbox.policy(_greedy_right)
    report = _node(3, every=4).run(policy=policy, verifier=toolbox.verifier(lambda text: 1.0)).report
    assert (report.metrics, report.seconds, policy.calls) == ({}, {}, [])
    assert Accuracy.final_pass


def test_problems_and_seeds_are_the_same_at_every_evaluation(toolbox):
    first, last = (toolbox.policy(_greedy_right) for _ in range(2))
    for iteration, policy in ((0, first), (10, last)):
        _node(iteration, samples=2).run(policy=policy, verifier=toolbox.verifier(lambda text: 1.0))
    for a, b in zip(first.calls, last.calls, strict=True):
        assert torch.equal(a.seed, b.seed)
        assert a.tokens.equal(b.tokens)


def test_ids_of_held_out_problems_never_meet_training_ids():
    node = _node()
    train = Context(node_index=127, iteration=(1 << 24) - 2).uids(1000)
    assert int(node.prompts.uid.min()) > int(train.max())
    assert int(node.prompts.uid.max()) < 2**63 - 1
    assert len(node.prompts) == 6


def test_a_missing_section_is_reported():
    node = Accuracy(Accuracy.Config(split="evl"))
    with pytest.raises(
        ConfigError,
        match=r"node 'evaluator': expected held-out problems in data\.evl, .* no such section\. Did you mean 'eval'\?",
    ):
        node.setup(Context(node="evaluator", data=DATA))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"every": -1}, "expected every and num_problems ≥ 0, got -1 and 200"),
        ({"samples": 4, "temperature": 0.0}, "expected temperature > 0 with samples 4, got 0"),
    ],
)
def test_impossible_settings_are_reported(settings, text):
    with pytest.raises(ValueError, match=text):
        Accuracy.Config(**settings)


def test_replicas_share_problems_and_sum_counts(toolbox):
    """Counts of two replicas add up to those of one; samples of a problem do not depend on its replica."""
    settings = {"samples": 2, "num_problems": 5}

    def verified(text):
        return float(sum(map(ord, text)) % 3 == 0)

    def word(context, n):
        return "abc"[(sum(map(ord, context)) + n) % 3]

    whole = _node(**settings).run(policy=toolbox.policy(word), verifier=toolbox.verifier(verified)).report.metrics
    sums, parts = [], []
    for rank in range(2):
        node = Accuracy(Accuracy.Config(**settings))
        node.setup(
            Context(
                node="evaluator",
                node_index=5,
                seed=1,
                iterations=10,
                data=DATA,
                ranks=Ranks(rank=rank, world=2, num_replicas=2),
            )
        )
        given = []
        node.context.all_sum = lambda x, given=given: given.append(x) or x
        node.run(policy=toolbox.policy(word), verifier=toolbox.verifier(verified))
        sums.append(given)
        parts.append(len(node.prompts))
    assert parts == [3, 2]
    totals = [a + b for a, b in zip(*sums, strict=True)]
    both = _node(**settings)
    iterator = iter(totals)
    both.context.all_sum = lambda x: next(iterator)
    assert both.run(policy=toolbox.policy(word), verifier=toolbox.verifier(verified)).report.metrics == whole
