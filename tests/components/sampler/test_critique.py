"""Originals and the best refinement."""

import pytest
import torch

from creditgraph.components.sampler.critique import Critique, best_of, to_refine
from creditgraph.components.text.stops import decode_rows
from creditgraph.components.verifier.exact import Exact
from creditgraph.pipeline.core.handles import Scores

VALUES = {"poor": 0.0, "half": 0.5, "good": 1.0}


def _rule(text):
    if "nan" in text:
        return float("nan")
    if "?" in text:
        raise RuntimeError("no verdict")
    return next((v for k, v in VALUES.items() if k in text), 0.0)


def _scored(toolbox, script):
    class Scoring(toolbox.policy):
        def score(self, context, tokens, temperature=1.0, top=0):
            self.scored = (decode_rows(self.tokenizer, context.to_lists()), temperature)
            return Scores(
                logprobs=tokens.with_values(torch.full((len(tokens.values),), -9.0)),
                entropies=tokens.with_values(torch.full((len(tokens.values),), 4.0)),
            )

    return Scoring(script)


def _run(toolbox, originals, refinements, prompts=("p",), **settings):
    """`originals` and `refinements`: what the n-th request for a prompt and for a refinement gives."""
    texts = iter(refinements)
    policy = _scored(toolbox, lambda c, n: originals[n] if len(c) == 1 else next(texts))
    settings = {"originals": len(originals), "refinements": len(refinements), **settings}
    node = toolbox.start(Critique, **settings)
    out = node.run(prompts=toolbox.prompts(list(prompts)), policy=policy, verifier=toolbox.verifier(_rule)).trajectories
    return out, node.context.metrics, policy


def test_the_best_refinement_joins_the_group(toolbox):
    out, metrics, policy = _run(toolbox, ["good", "poor1", "poor2"], ["poor!", "half-a", "half-b", "poor?"])
    assert out.text == ["good", "poor1", "poor2", "half-a"]
    assert out.group.tolist() == out.prompt_uid.tolist() == [100] * 4
    # Wrong originals in turn: poor1, poor2, poor1, poor2; the second refinement refines poor2.
    assert out.parent.tolist() == [-1, -1, -1, out.uid[2].item()]
    prompts = decode_rows(policy.tokenizer, policy.calls[1].tokens.to_lists())
    assert ["poor1" in prompts[0], "poor2" in prompts[1], "poor1" in prompts[2], "poor2" in prompts[3]] == [True] * 4
    assert all("The final answer of this attempt is wrong." in text for text in prompts)
    assert len(torch.cat([call.seed for call in policy.calls]).unique()) == 7
    assert metrics["refinements"] == 4
    assert metrics["kept"] == 1
    assert metrics["kept_correct_share"] == metrics["no_refinement_share"] == 0
    assert metrics["sampled_tokens"] == sum(
        len(t) for t in ["good", "poor1", "poor2", "poor!", "half-a", "half-b", "poor?"]
    )


def test_a_refinement_is_trained_under_the_problem_and_scored_there(toolbox):
    out, metrics, policy = _run(toolbox, ["poor"], ["good"], temperature=0.7)
    assert decode_rows(policy.tokenizer, out.prompt_tokens.to_lists()) == ["p", "p"]
    assert policy.scored == (["p"], 0.7)
    assert out.engine_logprobs.row(1).tolist() == [-9.0] * 4
    assert out.entropies.row(1).tolist() == [4.0] * 4
    assert metrics["refinement_logprob_change"] < -8


def test_all_right_is_left_as_it_is(toolbox):
    out, metrics, policy = _run(toolbox, ["good", "good"], ["good"])
    assert out.text == ["good", "good"]
    assert len(policy.calls) == 1
    assert metrics["no_refinement_share"] == 1


def test_no_refinements_are_plain_groups(toolbox):
    out, metrics, policy = _run(toolbox, ["good", "poor"], [])
    assert out.text == ["good", "poor"]
    assert len(policy.calls) == 1
    assert metrics["refinements"] == 0


def test_a_refinement_that_never_ends_is_never_the_best(toolbox):
    out, metrics, _ = _run(toolbox, ["poor"], ["good" + "!" * 99, "half"], max_tokens=50)
    assert out.text == ["poor", "half"]
    assert metrics["unended_share"] == 0.5
    none, metrics, _ = _run(toolbox, ["poor"], ["good" + "!" * 99], max_tokens=50)
    assert none.text == ["poor"]
    assert metrics["no_refinement_share"] == 1


def test_unverified_rows(toolbox):
    out, _, policy = _run(toolbox, ["poor?", "poor"], ["good?", "half"])
    assert out.text == ["poor?", "poor", "half"]
    prompts = decode_rows(policy.tokenizer, policy.calls[1].tokens.to_lists())
    assert not any("poor?" in text for text in prompts)
    assert _run(toolbox, ["poor"], ["nan", "half"])[0].text == ["poor", "half"]


def test_pieces_by_hand():
    assert to_refine(torch.tensor([False, False]), 3).tolist() == []
    assert to_refine(torch.tensor([True, False, True]), 5).tolist() == [0, 2, 0, 2, 0]
    value, prompt = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5]), torch.tensor([7, 7, 7, 8, 9])
    assert best_of(value, torch.tensor([True, True, True, True, False]), prompt).tolist() == [1, 3]
    assert best_of(value, torch.zeros(5, dtype=torch.bool), prompt).tolist() == []


def test_a_prompt_does_not_depend_on_its_neighbours(toolbox):
    node = toolbox.start(Critique, originals=2, refinements=2)
    verifier = toolbox.verifier(lambda t: 0.0)
    both, alone = (_scored(toolbox, lambda c, n: "a") for _ in range(2))
    node.run(prompts=toolbox.prompts(["p", "q"]), policy=both, verifier=verifier)
    node.run(prompts=toolbox.prompts(["p", "q"]).select(torch.tensor([1])), policy=alone, verifier=verifier)
    assert [call.seed[2:].tolist() for call in both.calls] == [call.seed.tolist() for call in alone.calls]


def test_no_prompts(toolbox):
    node = toolbox.start(Critique)
    out = node.run(
        prompts=toolbox.prompts([]), policy=_scored(toolbox, lambda c, n: ""), verifier=toolbox.verifier(_rule)
    )
    assert len(out.trajectories) == 0


def test_settings_are_checked():
    with pytest.raises(ValueError, match="expected originals ≥ 1, got 0"):
        Critique.Config(originals=0)


def test_the_embedded_model_refines(tiny):
    node = tiny.start(Critique, originals=3, refinements=4, mode="thought", max_tokens=120)
    verifier = tiny.start(Exact).run().verifier
    out = node.run(prompts=tiny.prompts, policy=tiny.policy, verifier=verifier).trajectories
    refined = out.parent >= 0
    assert 0 < int(refined.sum()) <= len(tiny.prompts)
    # Every row's log-probs are those under the prompt it is trained with.
    scores = tiny.policy.score(out.prompt_tokens, out.response_tokens)
    torch.testing.assert_close(scores.logprobs.values, out.engine_logprobs.values, rtol=0, atol=1e-4)
    assert torch.equal(
        out.prompt_tokens.select(refined).values,
        tiny.prompts.tokens.select(tiny.prompts.index_of(out.prompt_uid[refined])).values,
    )
