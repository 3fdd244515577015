"""True values against enumeration on a scripted policy; credit per thought by hand."""

import math

import numpy as np
import pytest
import torch

from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.lab.bench.thoughts import naming, thought_credit
from creditgraph.pipeline.app.credit.thought_credit import effective_credit
from creditgraph.pipeline.app.credit.truth import Truth, true_values
from creditgraph.pipeline.core.handles import Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit
from creditgraph.pipeline.core.streams import Stream

STOP = "</thought>"
A, B = "a" + STOP, "b" + STOP
# Success is "aa" or "ba…": after a the next is a with probability 3/4, after b with 1/4; the first is a with
# probability 1/2.
CHANCE = {"": 0.5, "a": 0.75, "b": 0.25}


def value_by_enumeration(prefix):
    """The chance that the second thought is a."""
    if len(prefix) == 2:
        return float(prefix[1] == "a")
    p = CHANCE[prefix]
    return p * value_by_enumeration(prefix + "a") + (1 - p) * value_by_enumeration(prefix + "b")


def letters(text):
    return text.replace(STOP, "")


@pytest.fixture
def policy(toolbox):
    """Every state gets its thoughts in the exact proportions above: the n-th of 4 draws is a for n < 4·chance."""

    def script(context, n):
        done = letters(context.removeprefix("P"))
        first = "a" if (n % 8) // 4 < 2 * CHANCE[""] else "b"
        if done:
            return A if n % 4 < 4 * CHANCE[done] else B
        return (first + STOP) + (A if n % 4 < 4 * CHANCE[first] else B)

    return toolbox.policy(script)


@pytest.fixture
def verifier(toolbox):
    return toolbox.verifier(lambda text: float(letters(text)[1:2] == "a"))


@pytest.fixture
def rows(toolbox):
    return toolbox.trajectories(
        [A + A, A + B, B + A, B + B], thought_ends=Jagged.from_rows([[11, 22]] * 4, torch.int32)
    )


def measured(toolbox, policy, verifier, rows, samples=16):
    sampling = Sampling(max_tokens=100, thoughts=ThoughtLimits(max_thoughts=2, final="none"))
    return true_values(policy, verifier, toolbox.prompts(["P"]), rows, sampling, samples, Stream(0))


def test_values_are_those_of_enumeration(toolbox, policy, verifier, rows):
    truth = measured(toolbox, policy, verifier, rows)
    expected = [[value_by_enumeration(t[:k]) for k in range(3)] for t in ("aa", "ab", "ba", "bb")]
    assert truth.values.to_lists() == expected
    # V("") = ½·¾ + ½·¼ = ½; A(aa) = (¾ − ½, 1 − ¾)
    assert truth.advantage.row(0).tolist() == [0.25, 0.25]
    assert truth.advantage.row(3).tolist() == [-0.25, -0.25]


def test_equal_prefixes_are_continued_once(toolbox, policy, verifier, rows):
    truth = measured(toolbox, policy, verifier, rows)
    assert truth.num_states == 3  # "", "a", "b"
    assert len(policy.calls) == 1
    assert len(policy.calls[0].seed) == 3 * 16
    # 16 continuations of 22 tokens from the prompt, 16 of 11 from each of a and b
    assert truth.sampled_tokens == 16 * 22 + 2 * 16 * 11


def test_known_states_are_not_continued_again(toolbox, policy, verifier, rows):
    sampling = Sampling(max_tokens=100, thoughts=ThoughtLimits(max_thoughts=2, final="none"))
    known = {}
    args = (policy, verifier, toolbox.prompts(["P"]))
    true_values(*args, rows.select(torch.tensor([0])), sampling, 8, Stream(0), known)
    assert len(known) == 2  # "", "a"
    second = true_values(*args, rows, sampling, 8, Stream(0), known)
    assert len(policy.calls[1].seed) == 8  # "b" only
    assert second.sampled_tokens == 8 * 11
    assert second.values.row(0).tolist() == [0.5, 0.75, 1.0]


def test_continuations_depend_on_the_state_and_not_on_the_batch(toolbox, policy, verifier, rows):
    measured(toolbox, policy, verifier, rows, samples=4)
    measured(toolbox, policy, verifier, rows.select(torch.tensor([2])), samples=4)
    whole, part = policy.calls
    assert len(set(whole.seed.tolist())) == 12
    assert part.seed.tolist() == whole.seed[torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])].tolist()


def test_halves_average_to_the_value(toolbox, policy, verifier, rows):
    truth = measured(toolbox, policy, verifier, rows, samples=4)
    first, second = truth.halves
    assert torch.allclose((first.values + second.values) / 2, truth.values.values)


def test_a_response_without_thought_ends_is_cut_at_its_stop_strings(toolbox, policy, verifier):
    rows = toolbox.trajectories([A + A], thought_ends=Jagged.from_rows([[]], torch.int32))
    assert measured(toolbox, policy, verifier, rows).ends.to_lists() == [[11, 22]]


def test_an_odd_number_of_continuations_is_refused(toolbox, policy, verifier, rows):
    with pytest.raises(ValueError, match="expected an even number of samples of at least 2, got 5"):
        measured(toolbox, policy, verifier, rows, samples=5)


def test_values_of_the_embedded_model_fall_after_the_first_error(tiny):
    from creditgraph.components.sampler.chains import Chains
    from creditgraph.components.verifier.exact import Exact
    from creditgraph.lab.bench.credit_bench import describe_truth

    sampling = {"mode": "thought", "temperature": 1.0, "max_tokens": 120}
    rows = tiny.start(Chains, group_size=6, **sampling).run(prompts=tiny.prompts, policy=tiny.policy).trajectories
    verifier = tiny.start(Exact).run().verifier
    truth = true_values(
        tiny.policy, verifier, tiny.prompts, rows, Chains.Config(group_size=6, **sampling).sampling(), 8, Stream(0)
    )
    about = describe_truth(truth)
    assert about["value_sound"] > about["value_after_error"] + 0.2
    assert ((truth.error > 0) == ~truth.correct).all()


def make_truth(toolbox):
    """Two rows of two thoughts each (2 + 3 and 1 + 2 tokens); the first fails in its second thought."""
    values = Jagged.from_rows([[0.5, 0.8, 0.0], [0.5, 0.75, 1.0]], torch.float64)
    return Truth(
        ends=Jagged.from_rows([[2, 5], [1, 3]], torch.int32),
        values=values,
        halves=(values, values),
        advantage=Jagged.from_rows([[0.3, -0.8], [0.25, 0.25]], torch.float64),
        error=torch.tensor([2, 0]),
        correct=torch.tensor([False, True]),
        valid=torch.tensor([True, True]),
        num_states=4,
        sampled_tokens=0,
    )


def ones(credit):
    return credit.with_values(torch.ones(len(credit.values), dtype=torch.bool))


def test_credit_per_thought_by_hand(toolbox):
    credit = Jagged.from_rows([[1.0, 2.0, -1.0, -3.0, -5.0], [1.0, 0.0, 4.0]], torch.float64)
    result = thought_credit(credit, ones(credit), torch.zeros(2, dtype=torch.int64), make_truth(toolbox))
    assert result.credit.tolist() == [1.5, -3.0, 1.0, 2.0]
    assert np.allclose(result.truth, [0.3, -0.8, 0.25, 0.25])
    # failed row: |−1| + |−3| + |−5| of 12; uniform: 3 of 5 tokens
    assert result.error_share == pytest.approx(9 / 12)
    assert result.uniform_share == pytest.approx(3 / 5)
    assert result.metrics()["sign"] == 1.0
    # The middles of two thoughts are at 1/4 and 3/4 of a response.
    assert result.third.tolist() == [0, 2, 0, 2]
    assert result.metrics()["pearson_1"] == pytest.approx(np.corrcoef([1.5, 1.0], [0.3, 0.25])[0, 1])
    assert math.isnan(result.metrics()["pearson_2"])


def test_naming_by_hand():
    # Row 0: the largest credit is on the thought that mattered most: a hit, by chance 1/2. Row 1: of three, one of two
    # largest hits: 1/2, by chance 1/3. Row 2: too little. Row 3: one thought, which is left out.
    # (3/2 − 5/6) / (2 − 5/6) = 4/7.
    credit = np.array([1.5, -3.0, 2.0, 0.0, -2.0, 1.0, 0.0, 9.0])
    truth = np.array([0.3, -0.8, 0.1, 0.0, -0.6, 0.05, 0.0, 0.9])
    rows = np.array([0, 0, 1, 1, 1, 2, 2, 3])
    assert naming(credit, truth, rows) == pytest.approx(4 / 7)
    assert math.isnan(naming(credit[5:], truth[5:], rows[5:]))


def test_naming_equals_a_slow_loop_and_knows_truth_and_uniform_credit():
    draws = np.random.default_rng(0)
    rows, truth = np.repeat(np.arange(20), 4), draws.normal(size=80).round(1)
    credit = draws.integers(-2, 3, size=80).astype(float)
    hits = chance = counted = 0.0
    for row in range(20):
        own = [abs(truth[i]) for i in range(80) if rows[i] == row]
        size = [abs(credit[i]) for i in range(80) if rows[i] == row]
        named = [i for i in range(4) if size[i] == max(size)]
        best = [i for i in range(4) if own[i] == max(own)]
        if max(own) >= 0.1:
            hits += len(set(named) & set(best)) / len(named)
            chance += len(best) / 4
            counted += 1
    assert naming(credit, truth, rows) == pytest.approx((hits - chance) / (counted - chance))
    assert naming(truth, truth, rows) == pytest.approx(1.0)
    assert naming(np.full(80, -0.7), truth, rows) == pytest.approx(0.0)


def test_inherited_thoughts_are_left_out(toolbox):
    credit = Jagged.from_rows([[0.0, 0.0, -1.0, -3.0, -5.0], [1.0, 0.0, 4.0]], torch.float64)
    mask = credit.with_values(credit.values != 0)
    result = thought_credit(credit, mask, torch.tensor([2, 0]), make_truth(toolbox))
    assert result.credit.tolist() == [-3.0, 1.0, 2.0]
    assert result.error_share == 1.0


def test_a_chain_without_credit_has_no_share(toolbox):
    credit = Jagged.from_rows([[0.0] * 5, [1.0, 0.0, 4.0]], torch.float64)
    result = thought_credit(credit, ones(credit), torch.zeros(2, dtype=torch.int64), make_truth(toolbox))
    assert math.isnan(result.error_share)
    assert result.metrics()["zero_share"] == 0.5


def credited(toolbox, **objective):
    rows = toolbox.trajectories(["abc", "de"], group=[1, 1])
    advantage = rows.response_tokens.with_values(torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5]))
    mask = rows.response_tokens.with_values(torch.tensor([True, True, True, False, True]))
    credit = Credit(uid=rows.uid, advantage=advantage, mask=mask)
    return effective_credit(rows, credit, ObjectiveSettings(**objective))


def test_effective_credit_of_grpo_is_the_advantage(toolbox):
    for use in ("ppo_clip", "reinforce", "gspo"):
        result = credited(toolbox, use=use)
        assert result.credit.values.tolist() == pytest.approx([1, 1, 1, 0, -0.5], abs=1e-6), use
    # seq_mean_token_mean: (1/2 rows)(1/T_i), T = 3 and 1
    weight = credited(toolbox, use="ppo_clip", aggregate="seq_mean_token_mean").weight
    assert weight.values.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0, -0.25], abs=1e-6)


def test_effective_credit_of_a_trace_by_hand(toolbox):
    # C_k = A (1 − d^{T−k+1})/(1 − d), d = ½: k = 1, 2, 3 of 3 → 1.75, 1.5, 1
    result = credited(toolbox, use="trace", config={"decay": 0.5})
    assert result.credit.values.tolist() == pytest.approx([1.75, 1.5, 1, 0, -0.5], abs=1e-6)
