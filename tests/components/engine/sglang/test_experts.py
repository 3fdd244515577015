"""Router replay with a real SGLang server: its experts are those of the weights, and a learner computes with them."""

from pathlib import Path

import pytest
import torch
from experts import make_model, wrong_rows

from creditgraph.components.engine.served.settings import PoolSettings
from creditgraph.components.engine.sglang.engine import SGLangEngine
from creditgraph.components.engine.sglang.settings import ProcessSettings
from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.step import RolloutTraining
from creditgraph.components.rollouts.requests import sample_from_prefix, sample_groups
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Prompts, Weights

ROOT = Path(__file__).resolve().parents[4]
PYTHON = ROOT / ".venv-sglang/bin/python"
PROCESS = ProcessSettings(python=str(PYTHON), environment={"PYTHONPATH": str(ROOT / "tests/sglang_cpu")})
pytestmark = [
    pytest.mark.xdist_group("sglang"),
    pytest.mark.skipif(not PYTHON.is_file(), reason="no SGLang; make it with tools/other_environment sglang"),
]
PROMPTS = Prompts(
    uid=torch.tensor([1, 2]),
    tokens=Jagged.from_rows([[5, 6, 7, 8, 9], [10, 11, 12]], torch.int32),
    text=["", ""],
    answer=["", ""],
    metadata=[{}, {}],
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return ModelSpec(path=make_model(tmp_path_factory.mktemp("experts")), max_context=256)


@pytest.fixture(scope="module")
def engine(spec, tmp_path_factory):
    settings = SGLangEngine.Config(process=PROCESS, pool=PoolSettings(restarts=0), return_routed_experts=True)
    engine = SGLangEngine(settings)
    engine.setup(Context(node="engine", run_dir=tmp_path_factory.mktemp("run"), model=spec))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def learner(spec):
    learner = HFLearner(HFLearner.Config(old_logprobs="recompute"))
    learner.setup(Context(node="learner", iterations=3, model=spec))
    return learner


def changed(model, noise):
    """Weights with noise in the routers alone."""
    from creditgraph.components.models.experts import unstack

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return dict(unstack(model.state_dict()))


def mismatch(learner, rows):
    ones = rows.response_tokens.with_values(torch.ones(len(rows.response_tokens.values)))
    credit = Credit(uid=rows.uid, advantage=ones, mask=ones.with_values(ones.values > 0))
    version = int(rows.policy_version[0])
    training = RolloutTraining(learner.config, learner.context, learner.backend, rows, credit, version)
    return float((training.score(reference=False).values - rows.engine_logprobs.values).abs().mean())


def test_experts_are_those_of_the_weights_and_replaying_them_closes_the_gap(engine, learner, spec):
    from creditgraph.components.models.load import load_causal_lm

    model = load_causal_lm(spec)  # whose routers get noise that the learner's lack
    policy = engine.run(weights=Weights(version=1, tensors=changed(model, 0.05))).policy
    sampler = Context(node="sampler", model=spec)
    ways = {
        "plain": Sampling(max_tokens=12),
        "ended by their text": Sampling(max_tokens=60, stop=("3", "7")),
        "thoughts": Sampling(max_tokens=60, thoughts=ThoughtLimits(max_tokens=5, max_thoughts=2, stop="4")),
    }
    for name, sampling in ways.items():
        rows = sample_groups(sampler, policy, PROMPTS, 3, sampling)
        wrong, known = wrong_rows(model, rows.prompt_tokens, rows.response_tokens, rows.routed_experts)
        assert (wrong, known) == ([], 6), name
    # A continuation has those of its whole row, of the inherited prefix too.
    half = rows.response_tokens.lengths // 2
    children = sample_from_prefix(policy, rows, half, torch.arange(6), Sampling(max_tokens=20), torch.arange(6) + 50)
    assert int(children.inherited.min()) > 0
    wrong, known = wrong_rows(model, children.prompt_tokens, children.response_tokens, children.routed_experts)
    assert (wrong, known) == ([], 6)
    apart, replayed = mismatch(learner, rows.replace(routed_experts=None)), mismatch(learner, rows)
    assert 0 < replayed < 0.8 * apart


def test_a_model_without_experts_is_refused():
    engine = SGLangEngine(SGLangEngine.Config(process=PROCESS, return_routed_experts=True))
    text = r"engine\.return_routed_experts: expected a model with experts, got 'tiny' of type qwen2\. Set engine\.ret"
    with pytest.raises(ConfigError, match=text):
        engine.setup(Context(node="engine"))
