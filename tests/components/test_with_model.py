"""Every component between prompts and learner once with the embedded model, on the device under test."""

import pytest
import torch

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.buffer.merge import Merge
from creditgraph.components.evaluator.accuracy import Accuracy
from creditgraph.components.evaluator.resets import Resets
from creditgraph.components.expander.reset import Reset
from creditgraph.components.localizer.oracle import OracleLocalizer
from creditgraph.components.localizer.self_localizer import SelfLocalizer
from creditgraph.components.localizer.uniform import UniformLocalizer
from creditgraph.components.rewards.outcome import Outcome
from creditgraph.components.rewards.overlong import Overlong
from creditgraph.components.sampler.chains import Chains
from creditgraph.components.sampler.dynamic import Dynamic
from creditgraph.components.sampler.failures import Failures
from creditgraph.components.segmenter.thought import Thoughts
from creditgraph.components.tasks import TASKS
from creditgraph.components.tasks.base import split_thoughts
from creditgraph.components.verifier.exact import Exact
from creditgraph.components.verifier.math import Math
from creditgraph.pipeline.core.jagged import Jagged

CHAINS = TASKS["chains"]

LIMITS = {"max_tokens": 120, "mode": "thought", "temperature": 1.0}


@pytest.fixture(scope="module")
def verifier(tiny):
    return tiny.start(Exact).run().verifier


@pytest.fixture(scope="module")
def fresh(tiny):
    return tiny.start(Chains, group_size=4, **LIMITS).run(prompts=tiny.prompts, policy=tiny.policy).trajectories


@pytest.fixture(scope="module")
def sampled(tiny, verifier):
    return tiny.start(Failures, **LIMITS, top_p=1.0).run(prompts=tiny.prompts, policy=tiny.policy, verifier=verifier)


@pytest.fixture(scope="module")
def suffixes(tiny, sampled):
    errors = tiny.start(OracleLocalizer).run(prompts=tiny.prompts, failures=sampled.failures, policy=tiny.policy).errors
    made = (
        tiny.start(Reset, **LIMITS, top_p=1.0)
        .run(prompts=sampled.prompts, failures=sampled.failures, errors=errors, policy=tiny.policy)
        .trajectories
    )
    return errors, made


def test_chains(tiny, fresh):
    assert len(fresh) == 4 * len(tiny.prompts)
    assert fresh.response_tokens.lengths.min() > 0
    assert (fresh.thought_ends.lengths >= 1).all()
    again = (
        tiny.start(Chains, group_size=4, **LIMITS)
        .run(prompts=tiny.prompts.select(torch.tensor([2])), policy=tiny.policy)
        .trajectories
    )
    assert again.text == fresh.text[8:12]


def test_engine_numbers_are_those_of_teacher_forcing(tiny, fresh, suffixes):
    for batch in (fresh, suffixes[1]):
        scores = tiny.policy.score(batch.prompt_tokens, batch.response_tokens)
        torch.testing.assert_close(scores.logprobs.values, batch.engine_logprobs.values, rtol=0, atol=1e-4)
        torch.testing.assert_close(scores.entropies.values, batch.entropies.values, rtol=0, atol=1e-4)


def test_exact_and_math_agree_with_the_task(tiny, fresh, verifier):
    node = tiny.start(Math, workers=1)
    try:
        exact, same = verifier.verify(tiny.prompts, fresh), node.run().verifier.verify(tiny.prompts, fresh)
    finally:
        node.close()
    assert exact.correct.tolist() == same.correct.tolist()
    assert exact.valid.all()
    problems = [tiny.prompts.metadata[i] for i in tiny.prompts.index_of(fresh.prompt_uid).tolist()]
    for text, problem, correct in zip(fresh.text, problems, exact.correct.tolist(), strict=True):
        if CHAINS.first_error(problem, split_thoughts(text)) == 0:
            assert correct


def test_failures(tiny, sampled, verifier):
    rewards = verifier.verify(tiny.prompts, sampled.failures)
    assert len(rewards) > 0
    assert not rewards.correct.any()
    with_failure = set(sampled.failures.prompt_uid.tolist())
    for uid in tiny.prompts.uid.tolist():
        assert int((sampled.trajectories.prompt_uid == uid).sum()) == (4 if uid in with_failure else 8)


def test_dynamic(tiny, verifier):
    node = tiny.start(Dynamic, group_size=4, groups=2, **LIMITS)
    out = node.run(prompts=tiny.prompts, policy=tiny.policy, verifier=verifier)
    correct = verifier.verify(out.prompts, out.trajectories).correct.view(-1, 4).sum(1)
    assert len(correct) == len(out.prompts) > 0
    assert ((correct > 0) & (correct < 4)).all()


def test_localizers(tiny, sampled):
    failures, count = sampled.failures, sampled.failures.thought_ends.lengths
    for kind in (SelfLocalizer, UniformLocalizer, OracleLocalizer):
        settings = {"max_tokens": 120} if kind is SelfLocalizer else {}
        errors = tiny.start(kind, **settings).run(prompts=tiny.prompts, failures=failures, policy=tiny.policy).errors
        assert ((errors.step >= 1) & (errors.step <= count)).all()
        assert len(errors.source) == len(failures)


def test_reset_prefixes_are_right_up_to_the_error(tiny, sampled, suffixes):
    errors, made = suffixes
    parents = sampled.failures.index_of(made.parent)
    for i, row in enumerate(parents.tolist()):
        kept = int(made.inherited[i])
        assert torch.equal(made.response_tokens.row(i)[:kept], sampled.failures.response_tokens.row(row)[:kept])
        problem = tiny.prompts.metadata[int(tiny.prompts.index_of(made.prompt_uid[i : i + 1]))]
        prefix = split_thoughts(tiny.policy.tokenizer.decode(made.response_tokens.row(i)[:kept].tolist()))
        assert len(prefix) == int(errors.step[row]) - 1
        assert not 0 < CHAINS.first_error(problem, prefix) <= len(prefix)


def test_from_merge_to_credit(tiny, sampled, suffixes, verifier):
    errors, made = suffixes
    prompts = [sampled.prompts, sampled.prompts]
    merged = tiny.start(Merge).run(trajectories=[sampled.trajectories, made], prompts=prompts).trajectories
    rewards = tiny.start(Outcome).run(verifier=verifier, trajectories=merged, prompts=tiny.prompts).rewards
    shaped = tiny.start(Overlong, max_length=60, buffer=20).run(trajectories=merged, rewards=rewards).rewards
    assert (shaped.value <= rewards.value).all()
    credit = tiny.start(GroupAdvantage, normalize="std_exact").run(trajectories=merged, rewards=rewards).credit
    assert credit.mask.sum().tolist() == (merged.response_tokens.lengths - merged.inherited).tolist()
    report = (
        tiny.start(Resets)
        .run(prompts=tiny.prompts, failures=sampled.failures, errors=errors, trajectories=made, rewards=rewards)
        .report
    )
    assert report.metrics["clean"] == report.metrics["exact"] == 1


def test_thought_segments_read_from_text_equal_those_of_the_engine(tiny, fresh):
    node = tiny.start(Thoughts)
    expected = node.run(trajectories=fresh).segments
    bare = fresh.replace(thought_ends=Jagged.from_rows([[]] * len(fresh), torch.int32))
    actual = node.run(trajectories=bare).segments
    assert node.context.metrics["searched_share"] > 0
    assert actual.ends.equal(expected.ends)


def test_accuracy(tiny, verifier):
    node = tiny.start(Accuracy, samples=4, num_problems=5, **LIMITS)
    first, second = (node.run(policy=tiny.policy, verifier=verifier).report.metrics for _ in range(2))
    assert first == second
    assert first["problems"] == 5
    assert 0 <= first["mean_at_4"] <= first["pass_at_2"] <= first["pass_at_4"] <= 1
