"""Interventions: the wrong step is replaced, tested, and learned with what stands before it."""

import pytest
import torch

from creditgraph.components.expander.intervene import Intervene
from creditgraph.pipeline.core.handles import Scores, ThoughtLimits
from creditgraph.pipeline.core.payloads import StepErrors

BAD = "a</thought>b</thought>\\boxed{2}</thought>"
LIMITS = {"thoughts": ThoughtLimits(max_thoughts=5), "max_tokens": 100}


@pytest.fixture
def run(toolbox):
    """Intervenes in failures at their steps; the script gets the request's text and its number for that text."""

    class Policy(toolbox.policy):
        def score(self, context, tokens, temperature=1.0):
            self.context = context
            values = torch.full((len(tokens.values),), -0.25)
            return Scores(logprobs=tokens.with_values(values), entropies=tokens.with_values(-values))

    def start(texts, steps, script, solution="", rule=lambda text: "\\boxed{1}" in text, **settings):
        failures = toolbox.trajectories(texts)
        prompts = toolbox.prompts(["P"], metadata=[{"template": "thought"}]).replace(solution=[solution])
        errors = StepErrors(
            uid=failures.uid, step=torch.tensor(steps, dtype=torch.int64), source=["oracle"] * len(steps)
        )
        node = toolbox.start(Intervene, **{**LIMITS, **settings})
        policy = Policy(script)
        out = node.run(
            prompts=prompts, failures=failures, errors=errors, policy=policy, verifier=toolbox.verifier(rule)
        )
        return out, node.context.metrics, policy

    return start


def test_a_proposed_step_stands_under_the_problem(run):
    def script(context, n):
        return "c</thought>rest" if "Wrong attempt" in context else "\\boxed{1}</thought>"

    out, metrics, policy = run([BAD], [2], script, solution="A</thought>C</thought>")
    made = out.trajectories
    assert made.text == ["a</thought>c</thought>"]
    assert made.prompt_tokens.to_lists() == [[80]] == policy.context.to_lists()
    assert made.inherited.tolist() == [11]
    assert made.thought_ends.to_lists() == [[11, 22]]
    assert made.parent.tolist() == [1000]
    assert set(made.engine_logprobs.values.tolist()) == {-0.25}
    assert out.credit.advantage.values.tolist() == [1.0] * 22
    assert out.credit.mask.values.all()
    asked = "".join(map(chr, policy.calls[0].tokens.row(0).tolist()))
    assert "Step 2: C" in asked  # the reference solution is shown
    assert asked.endswith("a</thought>")
    tested = "".join(map(chr, policy.calls[1].tokens.row(0).tolist()))
    assert tested == "Pa</thought>c</thought>"
    assert len(policy.calls[1].seed.unique()) == 4
    assert metrics["interventions"] == 1
    assert metrics["sampled_tokens"] == 11 + 4 * len("\\boxed{1}</thought>")
    assert metrics["replacement_logprob"] == pytest.approx(-0.25)


def test_what_is_dropped(run):
    # The first failure's step comes again; after the second's new step nothing is right; the third's is the answer.
    def script(context, n):
        if "Wrong attempt" not in context:
            return "\\boxed{3}</thought>"
        return {"a": "b</thought>", "x": "q</thought>", "y": "\\boxed{1}</thought>"}[
            context.split("</thought>")[-2][-1]
        ]

    texts = [BAD, BAD.replace("a<", "x<"), BAD.replace("a<", "y<")]
    out, metrics, _ = run(texts, [2, 2, 2], script)
    assert out.trajectories.text == ["y</thought>\\boxed{1}</thought>"]
    assert [metrics[name] for name in ("interventions", "unchanged", "failed")] == [1, 1, 1]


def test_no_failures_and_settings(run):
    out, metrics, policy = run([], [], lambda context, n: "")
    assert len(out.trajectories) == len(out.credit) == 0
    assert metrics["interventions"] == 0
    assert policy.calls == []
    with pytest.raises(ValueError, match="expected mode 'thought'"):
        Intervene.Config(mode="plain")
    with pytest.raises(ValueError, match="expected continuations ≥ 0, got -1"):
        Intervene.Config(continuations=-1)
