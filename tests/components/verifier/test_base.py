"""A verifier from outside, and what VerifierComponent does for it."""

from creditgraph import Item, Verdict, VerifierComponent
from creditgraph.pipeline.core.contract import check_component


class Palindrome(VerifierComponent):
    """Right when the boxed answer reads the same in both directions."""

    calls = 0

    def verdict(self, item: Item) -> Verdict:
        self.calls += 1
        answer = item.extracted() or ""
        correct = answer == answer[::-1] != ""
        return Verdict(value=float(correct), correct=correct, keep=answer != "later")


def test_one_class_with_a_verdict_is_a_verifier(toolbox):
    assert check_component(Palindrome) == []
    node = toolbox.start(Palindrome)
    verifier = node.run().verifier
    prompts = toolbox.prompts(["p"] * 3)
    texts = ["\\boxed{abba}", "\\boxed{abc}", "none"]
    rewards = verifier.verify(prompts, toolbox.trajectories(texts, prompt_uid=prompts.uid))
    assert rewards.correct.tolist() == [True, False, False]
    assert rewards.value.tolist() == [1.0, 0.0, 0.0]
    assert node.run().verifier is verifier


def test_verdicts_are_remembered_unless_a_second_try_may_decide(toolbox):
    node = toolbox.start(Palindrome)
    prompts = toolbox.prompts(["p"] * 3)
    texts = ["\\boxed{abba}", "\\boxed{later}", "\\boxed{abba}"]
    trajectories = toolbox.trajectories(texts, prompt_uid=prompts.uid[[0, 1, 0]])
    node.verify(prompts, trajectories)
    assert node.calls == 2
    node.verify(prompts, trajectories)
    assert node.calls == 3
