"""A teacher with weights of its own: its engine, its credit, and a run that reaches its accuracy."""

import json

import pytest
import torch

from creditgraph.components.advantage.teachers.teacher import Teacher
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.models.load import resolve_model_path
from creditgraph.components.sampler.chains import Chains
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import DataError, GraphError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose


@pytest.fixture(scope="module")
def fresh(tiny):
    limits = {"max_tokens": 60, "mode": "thought", "temperature": 1.0}
    return tiny.start(Chains, group_size=2, **limits).run(prompts=tiny.prompts, policy=tiny.policy).trajectories


@pytest.fixture(scope="module")
def engine(device):
    """An engine whose model is its own; that of the run does not exist."""
    started = LocalEngine(LocalEngine.Config(model=resolve_model_path("tiny")))
    started.setup(Context(node="teacher", device=device, model=ModelSpec(path="/nowhere")))
    yield started
    started.close()


def test_an_engine_with_its_own_model_needs_no_weights(engine, tiny, fresh):
    policy = engine.run().policy
    assert policy.version == 0
    assert engine.run().policy.version == 0  # a later iteration loads nothing
    own, run = (p.score(fresh.prompt_tokens, fresh.response_tokens, 1.0) for p in (policy, tiny.policy))
    assert own.logprobs.equal(run.logprobs)
    assert own.top_tokens is None


def test_the_most_likely_tokens(engine, fresh):
    policy = engine.run().policy
    scores = policy.score(fresh.prompt_tokens, fresh.response_tokens, 0.7, top=3)
    assert scores.top_tokens.shape == scores.top_logprobs.shape == (len(fresh.response_tokens.values), 3)
    assert (scores.top_logprobs.diff(dim=1) <= 0).all()
    hit = scores.top_tokens == fresh.response_tokens.values[:, None]
    torch.testing.assert_close(scores.top_logprobs[hit], scores.logprobs.values[hit.any(1)])
    # Each alone is what scoring it in that place gives.
    first = Jagged.from_rows([[int(t)] for t in scores.top_tokens[fresh.response_tokens.offsets[:-1], 1]], torch.int32)
    alone = policy.score(fresh.prompt_tokens, first, 0.7).logprobs.values
    torch.testing.assert_close(alone, scores.top_logprobs[fresh.response_tokens.offsets[:-1], 1])
    whole = policy.score(fresh.prompt_tokens, fresh.response_tokens, top=10**6)
    torch.testing.assert_close(whole.top_logprobs.exp().sum(1), torch.ones(len(whole.top_logprobs)))


def test_credit_and_candidates(tiny, fresh):
    node = tiny.start(Teacher, top=2)
    credit = node.run(trajectories=fresh, policy=tiny.policy).credit
    # The policy as its own teacher: no gap.
    assert credit.advantage.values.abs().max() < 1e-4
    assert set(credit.columns) == {"candidate_0", "candidate_1", "teacher_logprob_0", "teacher_logprob_1"}
    best = credit.columns["teacher_logprob_0"].values
    assert (best >= credit.columns["teacher_logprob_1"].values).all()
    assert 0.5 < node.context.metrics["candidates_mass"] <= 1
    own = float(fresh.engine_logprobs.values.mean())
    assert node.context.metrics["teacher_logprob"] == pytest.approx(own, abs=1e-4)


def test_a_teacher_of_another_vocabulary_is_refused(tiny, fresh):
    node = tiny.start(Teacher)

    class Other:
        tokenizer = type("Tokenizer", (), {"get_vocab": staticmethod(lambda: {"a": 0})})

    with pytest.raises(DataError, match=r"expected a teacher with the vocabulary of model.path 'tiny'.* differs in"):
        node.run(trajectories=fresh, policy=Other())


def test_weights_or_a_model_of_its_own():
    with pytest.raises(GraphError, match=r"teacher.weights: not wired; .* Set teacher.model to its folder or hub name"):
        build_experiment(compose(["recipe=toy_distill", "teacher.model="]))
    with pytest.raises(GraphError, match=r"engine.weights: expected no wire at an engine with a model of its own"):
        build_experiment(compose(["recipe=toy_distill", "engine.model=tiny"]))


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains a recipe for ten iterations; returns its result, its metrics and its run directory."""
    root = tmp_path_factory.mktemp("runs")

    def run(recipe, *settings):
        small = ["run.iterations=10", "evaluator.every=0", "evaluator.num_problems=150", "data.eval.size=150"]
        name = f"{recipe}{len(list(root.iterdir()))}"
        assert main(["train", f"recipe={recipe}", f"run.root={root}", f"run.name={name}", *small, *settings]) == 0
        rows = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
        return json.loads((root / name / "result.json").read_text()), rows, root / name

    return run


@pytest.fixture(scope="module")
def taught(train, tmp_path_factory):
    """What ten iterations of GRPO gain, and their weights."""
    result, _, folder = train("toy_grpo")
    teacher = tmp_path_factory.mktemp("exported") / "teacher"
    assert main(["export", str(folder), "--output", str(teacher)]) == 0
    return result["accuracy_after"] - result["accuracy_before"], teacher


@pytest.mark.parametrize("top", [0, 4])
def test_the_student_reaches_its_teacher(train, taught, top):
    gain, teacher = taught
    result, rows, _ = train("toy_distill", f"teacher.model={teacher}", f"advantage.top={top}")
    assert result["accuracy_after"] - result["accuracy_before"] >= 0.6 * gain
    assert rows[9]["learner/teacher_kl"] < 0.6 * rows[0]["learner/teacher_kl"]
