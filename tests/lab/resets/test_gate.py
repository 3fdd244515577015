"""What decides whether resets pay: the estimates by hand, and the command on the embedded model."""

import json
import math

import numpy as np
import pytest

from creditgraph.lab.resets.gate import OWN, RANDOM, START, TRUE, Estimate, Gate, Kind, ratio, silence, success_by_step
from creditgraph.lab.resets.show import HALF, advice, best_split
from creditgraph.lab.resets.simulation import Chains, Ratio
from creditgraph.pipeline.app.cli import main


def test_ratio_and_its_error():
    # Without each prompt in turn: 5/5, 4/4 and 3/3 of the rest; by hand for [1, 0] of [1, 1]: leaves 0 and 1, whose
    # jackknife error is √(1/2 · (1/4 + 1/4)) = .5.
    assert ratio([1, 0], [1, 1]) == pytest.approx((0.5, 0.5))
    assert math.isnan(ratio([1, 0], [0, 0]).value)


def test_silence_is_the_mean_over_all_subsets():
    # 3 of 5 correct, groups of 2: both correct in 3 pairs, both wrong in 1, of 10.
    assert silence(3, 5, 2) == 0.4
    assert math.isnan(silence(1, 3, 4))


def test_chances_by_step():
    # Four responses: two fail at step 1, one at step 2, one is right. Places are alike in both problems, so the prior
    # is the mean itself: 2/4, then 1/2; step 3 exists only in the first problem and never fails.
    error = np.array([[1, 1, 2, 0], [1, 2, 1, 0]])
    success = success_by_step(error, np.array([3, 2]), 0.0)
    assert success == pytest.approx(np.array([[0.5, 0.5, 1.0], [0.5, 0.5, 1.0]]))
    # Half of the responses with an error end correct: four of four are wrong at step 1.
    assert success_by_step(error, np.array([3, 2]), 0.5)[:, 0].tolist() == [0.0, 0.0]


def by_hand(suffix_share: float, exact: float = 0.9) -> Gate:
    def kind(value: float) -> Kind:
        share = Estimate(suffix_share, 0.01)
        return Kind(
            suffix_share=share,
            value=Estimate(value, 0.01),
            silent={4: Estimate(0.3, 0.01), 8: Estimate(0.2, 0.01)},
            exact=Estimate(exact, 0.01),
        )

    return Gate(
        problems=4,
        responses=64,
        failures=8,
        unverified=0,
        truth="the task's own",
        start=Estimate(0.1, 0.01),
        silent=Estimate(0.5, 0.01),
        kinds={TRUE: kind(0.4), RANDOM: kind(0.1), START: kind(0.1), OWN: kind(0.3)},
        over_start=Estimate(4.0, 0.1),
        over_random=Estimate(4.0, 0.1),
        recovery=Estimate(0.1, 0.01),
        attempts={"1x4": Estimate(5.0, 0.0), "1x8": Estimate(1.1, 0.0)},
        group_size=8,
        max_attempts=12,
        chains=Chains(success=np.full((4, 3), 0.5), recovery=0.1),
    )


def table(own: float, true: float, error: float = 0.05) -> dict[str, dict[str, Ratio]]:
    return {
        "1x4": {TRUE: Ratio(1.0, error), OWN: Ratio(0.5, error), HALF: Ratio(0.8, error)},
        "1x8": {TRUE: Ratio(true, error), OWN: Ratio(own, error), HALF: Ratio(0.8, error)},
    }


def test_advice():
    assert best_split(table(2.0, 2.2)) == ("1x8", OWN)
    said = advice(by_hand(0.2), table(2.0, 2.2))
    assert said == (
        "Resets should pay: with split 1x8 and the recipe's localizer, GRPO is predicted to need 2.00 ± 0.05 times the "
        "tokens of resets and all four conditions hold."
    )
    said = advice(by_hand(0.6), table(2.0, 2.2))
    assert said.startswith("Resets may pay")
    assert said.endswith("; against it: share of tokens in suffixes 0.60 ± 0.01, expected ≤ 0.3.")
    said = advice(by_hand(0.2), table(0.7, 1.4))
    assert said.startswith("Stay with GRPO")
    assert said.endswith("though 1.40 with the true first error.")
    assert advice(by_hand(0.2), table(1.05, 1.0)).startswith("Resets and GRPO should be level")
    assert "gives no advice" in advice(by_hand(0.2), {"1x4": {TRUE: Ratio(math.nan, math.nan)}})


@pytest.fixture
def resets(capsys):
    def call(*arguments):
        capsys.readouterr()
        code = main(["resets", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_the_command(resets):
    code, out, _ = resets("recipe=toy_srpo_oracle", "--prompts", "12", "--samples", "16", "--json")
    assert code == 0
    result = json.loads(out)
    kinds = result["measured"]["kinds"]
    assert kinds[OWN]["exact"][0] == 1  # the localizer of this recipe is the oracle
    assert kinds[START]["suffix_share"][0] == pytest.approx(1, abs=0.1)
    assert kinds[TRUE]["value"][0] > kinds[RANDOM]["value"][0]
    # The simulated chains start where the policy does.
    assert result["simulated"]["value"] == pytest.approx(result["measured"]["start"][0], abs=0.1)


def test_mistakes(resets, tmp_path):
    for arguments, message in (
        (["recipe=toy_grpo", "sampler.mode=plain"], "expected thoughts. Set sampler.mode=thought"),
        ([str(tmp_path), "recipe=toy_grpo"], "expected one run directory, or recipe=NAME"),
        (["recipe=toy_grpo", "--prompts", "1"], "expected --prompts of at least 2"),
        (["recipe=toy_srpo_oracle", "--prompts", "2", "--samples", "8"], "responses are correct; expected at least 20"),
        ([str(tmp_path)], "no run there"),
    ):
        code, _, error = resets(*arguments)
        assert code == 2
        assert message in error
    few = ["recipe=toy_srpo_oracle", "--prompts", "2", "--samples", "8"]
    assert resets(*few) == resets(*few)  # how many of them are correct
