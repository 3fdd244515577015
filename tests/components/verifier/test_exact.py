"""String equality of extracted answers."""

from creditgraph.components.verifier.exact import Exact, normalise


def _verify(toolbox, texts, answers, **settings):
    prompts = toolbox.prompts(["p"] * len(texts), answers=answers)
    return (
        toolbox.start(Exact, **settings)
        .run()
        .verifier.verify(prompts, toolbox.trajectories(texts, prompt_uid=prompts.uid))
    )


def test_last_box_counts_and_white_space_does_not(toolbox):
    texts = ["\\boxed{3} no, \\boxed{ 7 }", "\\boxed{7} no, \\boxed{3}", "seven", "\\boxed{7.0}"]
    rewards = _verify(toolbox, texts, ["7"] * 4)
    assert rewards.correct.tolist() == [True, False, False, False]
    assert rewards.detail == ["", "answered '3'", "no answer in the response", "answered '7.0'"]
    assert rewards.valid.tolist() == [True] * 4


def test_case(toolbox):
    assert _verify(toolbox, ["\\boxed{YES.}"], ["yes"]).correct.tolist() == [True]
    assert normalise(" a  B ") == "a b"


def test_a_prompt_without_reference_is_invalid_and_alone_in_that(toolbox):
    rewards = _verify(toolbox, ["\\boxed{1}", "\\boxed{1}"], ["", "1"])
    assert rewards.valid.tolist() == [False, True]
    assert rewards.correct.tolist() == [False, True]
    assert rewards.detail[0] == "the prompt has no reference answer"


def test_the_verifier_is_one_object_and_takes_empty_batches(toolbox):
    node = toolbox.start(Exact)
    assert node.run().verifier is node.run().verifier
    assert len(node.run().verifier.verify(toolbox.prompts([]), toolbox.trajectories([]))) == 0
