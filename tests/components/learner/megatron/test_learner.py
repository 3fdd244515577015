"""learner.megatron against learner.hf on the same batches, float32, over layouts; checkpoints; failures."""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.megatron.learner import MegatronLearner
from creditgraph.components.learner.objective import OBJECTIVES
from creditgraph.pipeline.core.errors import RunError

TP2, PP2, VPP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"pipeline_parallel": 2, "virtual_pipeline": 2}
# Small buckets, so that there are several to overlap.
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}
# Of four ranks; what a layout leaves over are replicas.
ALL_OBJECTIVES: list[dict[str, Any]] = [PP2]
# What the ranks of a vocabulary have parts of: entropies, and log-probs of further tokens.
OVER_VOCABULARY = ["reinforce", "gspo_gated", "distill"]
ONE_OBJECTIVE: list[dict[str, Any]] = [
    {},
    {"distributed_optimizer": "on"},
    {**TP2, "distributed_optimizer": "on"},
    {"context_parallel": 2},
    VPP2,
    {**TP2, **VPP2, "sequence_parallel": True, "recompute": "full"},
]
OVERLAPPING: list[dict[str, Any]] = [
    {"distributed_optimizer": "on", "ddp": OVERLAP},
    {**VPP2, "distributed_optimizer": "on", "ddp": OVERLAP},
]
# What says how the work was cut, not what was learned.
CUT = {"replayed_tokens", "forward_tokens", "shared_tokens", "unique_tokens", "imbalance_before", "imbalance_after"}


@pytest.fixture(scope="session")
def training() -> Any:
    """The module training.py: functions for the pool."""
    name = "creditgraph_test_megatron_training"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "training.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen2 of four layers with grouped-query attention; its vocabulary is padded for tensor parallel."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=42,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("qwen2")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def reference(training: Any, folder: str) -> dict[str, dict[str, Any]]:
    return training.train_hf(folder, training.CASES)


def relative(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of a tensor over the tensor's largest value, over all tensors."""
    assert actual.keys() == expected.keys()
    return max(float((actual[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)


def distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """‖actual − expected‖ / ‖expected‖, all tensors as one vector."""
    a, b = (torch.cat([x[n].double().flatten() for n in sorted(expected)]) for x in (actual, expected))
    return float((a - b).norm() / b.norm())


def learned(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k not in CUT}


def compare(actual: dict[str, Any], expected: dict[str, Any], place: str) -> None:
    """Limits are about three times what was seen, as processors round differently; see docs/scaling.md."""
    for a, b in zip(actual["metrics"], expected["metrics"], strict=True):
        assert learned(a) == pytest.approx(learned(b), rel=3e-5, abs=2e-6), place
    assert float((actual["logprobs"] - expected["logprobs"]).abs().max()) < 3e-5, place
    if actual["gradients"]:
        assert distance(actual["gradients"], expected["gradients"]) < 1e-5, place
        assert relative(actual["gradients"], expected["gradients"]) < 3e-5, place
    assert relative(actual["weights"], expected["weights"]) < 3e-5, place
    # All weights as one vector.
    assert distance(actual["weights"], expected["weights"]) < 1e-6, place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "cases"),
    [
        (ALL_OBJECTIVES, [*sorted(OBJECTIVES), "p_trace"]),
        ([{**TP2, **PP2}], OVER_VOCABULARY),
        (ONE_OBJECTIVE, ["ppo_clip"]),
        (OVERLAPPING, ["ppo_clip"]),
    ],
)
def test_equal_to_learner_hf(
    pool: Any, training: Any, folder: str, reference: dict[str, Any], layouts: list[dict[str, Any]], cases: list[str]
) -> None:
    answers = pool.run(training.train_layouts, folder, layouts, {name: training.CASES[name] for name in cases})
    for place, layout in enumerate(layouts):
        for case in cases:
            result, name = answers[0][place][case], f"{layout}, {case}"
            assert all(other[place][case]["metrics"] == result["metrics"] for other in answers), name
            compare(result, reference[case], name)


def test_a_replica_without_rows_takes_part(pool: Any, training: Any, folder: str) -> None:
    learner = training.hf_learner(folder, training.CASES["reinforce"])
    trajectories, credit = training.make_batch(0, prompts=1)
    alone = learner.run(trajectories=trajectories, credit=credit)
    for metrics, weights, logprobs in pool.run(training.one_prompt, folder, {}):
        assert float((logprobs - alone.logprobs.logprobs.values).abs().max()) < 3e-5
        assert learned(metrics) == pytest.approx(learned(alone.report.metrics), rel=1e-5, abs=2e-6)
        assert relative(weights, alone.weights.tensors) < 1e-5


@pytest.mark.parametrize("old", ["engine", "recompute"])
def test_every_rank_has_all_logprobs_and_a_pipeline_reports_its_bubble(
    pool: Any, training: Any, folder: str, old: str
) -> None:
    settings = {**training.CASES["reinforce"], "old_logprobs": old, "micro_batch_tokens": 40}
    learner = training.hf_learner(folder, settings)
    trajectories, credit = training.make_batch(0)
    expected = learner.run(trajectories=trajectories, credit=credit).logprobs.logprobs.values
    for layouts in pool.run(training.one_step, folder, [{}, {**TP2, **PP2}], settings):
        for logprobs, _ in layouts:
            assert float((logprobs - expected).abs().max()) < 3e-5
        replicas, pipeline = (metrics for _, metrics in layouts)
        assert "bubble" not in replicas
        # Two stages and few micro-batches: at least one stage waits while the other computes.
        assert 0 < pipeline["bubble"] <= pipeline["bubble_max"] < 1


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("layout", [{}, PP2])
def test_nan_on_one_rank_skips_the_step_on_all(
    pool: Any, training: Any, folder: str, layout: dict[str, Any], what: str
) -> None:
    for metrics, stayed, again in pool.run(training.spoiled, folder, layout, what):
        assert (metrics["skipped_nonfinite"], metrics["steps"]) == (1.0, 0.0)
        assert stayed
        assert again


def test_bfloat16_stays_near_learner_hf(pool: Any, training: Any, folder: str) -> None:
    cases = {"reinforce": training.CASES["reinforce"]}
    of_hf = training.train_hf(folder, cases, "bfloat16")["reinforce"]
    layout = {**TP2, "distributed_optimizer": "on"}
    actual = pool.run(training.train_layouts, folder, [layout], cases, "bfloat16")[0][0]["reinforce"]
    assert {t.dtype for t in actual["weights"].values()} == {torch.bfloat16}
    for name, more in (("loss", {"abs": 0.05}), ("grad_norm", {})):
        expected = [m[name] for m in of_hf["metrics"]]
        assert [m[name] for m in actual["metrics"]] == pytest.approx(expected, rel=0.1, **more)
    # Steps of 3e-3 on weights of about 0.2, whose neighbours in bfloat16 are 1e-3 apart.
    gaps = [float((actual["weights"][n].float() - w.float()).abs().max()) for n, w in of_hf["weights"].items()]
    assert max(gaps) < 0.02


# --- checkpoints ---


@pytest.mark.slow
@pytest.mark.parametrize(("distributed", "layouts"), [("off", [PP2, VPP2]), ("on", [{**TP2, **PP2}, {}])])
def test_a_checkpoint_is_continued_by_any_layout(
    pool: Any, training: Any, folder: str, tmp_path: Path, distributed: str, layouts: list[dict[str, Any]]
) -> None:
    target, more = str(tmp_path / "shards"), {"distributed_optimizer": distributed}
    expected = pool.run(training.save_and_step, folder, {**TP2, **more}, target)[0]
    for layout in (TP2, *layouts):
        actual = pool.run(training.resume_and_step, folder, {**layout, **more}, target)[0]
        assert actual["version"] == expected["version"] == 3
        assert all(torch.equal(actual["saved"][n], w) for n, w in expected["saved"].items()), layout
        assert actual["metrics"]["trained_tokens_total"] == expected["metrics"]["trained_tokens_total"]
        assert actual["metrics"]["lr"] == expected["metrics"]["lr"]
        assert relative(actual["weights"], expected["weights"]) < 1e-6, layout


def test_a_damaged_checkpoint_is_refused_on_every_rank(pool: Any, training: Any, folder: str, tmp_path: Path) -> None:
    target = tmp_path / "shards"
    for text in pool.run(training.fails_to_load, folder, str(target)):
        assert "no Megatron checkpoint (metadata.json is missing)" in text
    pool.run(training.save_and_step, folder, {}, str(target))
    largest = max(target.glob("*.distcp"), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    for text in pool.run(training.fails_to_load, folder, str(target)):
        assert "does not fit this model or is damaged" in text


@pytest.mark.parametrize(("layout", "dtype"), [({**TP2, "distributed_optimizer": "on"}, "bfloat16"), (PP2, "float32")])
def test_taking_turns_with_engines_changes_no_bit(
    pool: Any, training: Any, folder: str, tmp_path: Path, layout: dict[str, Any], dtype: str
) -> None:
    answers = pool.run(training.taking_turns, folder, layout, dtype, str(tmp_path / "shards"))
    for answer in answers:
        assert answer["moved"] > 0
        assert answer["left"] == 0, "bytes of optimiser and gradients on the device while engines sample"
        assert answer["meetings"] == 6  # at the beginning and the end of three turns, one of which is the setup
        expected, *others = answer["weights"]
        for other in others:
            assert (other is None) == (expected is None)
            assert expected is None or all(torch.equal(other[n], w) for n, w in expected.items())
        # Every rank knows them, although only the last stage computes them.
        assert answer["tokens"]
        assert answer["scored"] == answers[0]["scored"]
    model = HFLearner(HFLearner.Config())
    model.setup(training.Context(node="learner", model=training.ModelSpec(path=folder, dtype=dtype)))
    model.model.causal_lm.load_state_dict(answers[0]["weights"][0], strict=False)
    assert answers[0]["scored"] == pytest.approx(model.scored().logprobs, abs=1e-5 if dtype == "float32" else 0.05)


def test_every_replica_writes_its_own_share_of_the_optimizer(
    pool: Any, training: Any, folder: str, tmp_path: Path
) -> None:
    answers = pool.run(training.shared, folder, str(tmp_path / "shards"))
    sizes = [size for size, _ in answers]
    # The first also writes the weights: a third as much as the float32 state of all.
    assert max(sizes[1:]) / min(sizes[1:]) < 1.2
    assert sizes[0] / sizes[1] == pytest.approx(1 + 4 / 3, rel=0.1)
    assert [moved for _, moved in answers] == [0, 0, 0, 0]


def test_a_rank_that_cannot_write_its_shards_is_an_error_on_every_rank(
    pool: Any, training: Any, folder: str, tmp_path: Path
) -> None:
    for text in pool.run(training.fails_to_save, folder, str(tmp_path / "shards")):
        assert "a rank could not write its part of the checkpoint" in text


def test_writers_that_are_killed_are_an_error_on_every_rank(
    pool: Any, training: Any, folder: str, tmp_path: Path
) -> None:
    for text in pool.run(training.loses_its_writer, folder, str(tmp_path / "shards")):
        assert "a rank could not write its part of the checkpoint" in text
        assert "expected room in host memory" in text


# --- whole runs ---

FAILING = """
import os
from creditgraph.components.learner.objective.ppo_clip import PPOClip
class Failing(PPOClip):
    def terms(self, inputs, meters):
        if os.environ["RANK"] == "1":
            raise ValueError("rank 1 fails inside the pipeline")
        return super().terms(inputs, meters)
"""


def run_logged(arguments: list[str], folder: str) -> int:
    """What `creditgraph` does in a rank's process, with the plug-ins of `folder`; the file of the rank gets stderr."""
    from creditgraph import main

    sys.path.insert(0, folder)
    log = os.open(f"{folder}/stderr.{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    return main(arguments)


@pytest.mark.slow
def test_a_rank_that_fails_mid_step_ends_the_run_with_its_error_in_front(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    settings = ["learner=megatron", "learner.tensor_parallel=2", "learner.objective.use=failing:Failing"]
    settings += ["run.iterations=1", "prompts.batch=4", "evaluator.num_problems=4"]
    command = ["train", "recipe=toy_srpo", *settings, f"run.root={tmp_path}", "run.name=fails"]
    # Both ranks end their process.
    with pytest.raises(AssertionError, match="rank 0: the process died\nrank 1: the process died"):
        processes(2).run(run_logged, command, str(tmp_path))
    text = "".join((tmp_path / f"stderr.{rank}").read_text() for rank in range(2))
    said = [line for line in text.splitlines() if line.startswith("creditgraph: ")]
    assert said, text
    assert all("rank 1" in line and "rank 1 fails inside the pipeline" in line for line in said), said


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tensor_parallel": 0}, r"expected at least 1 \(1: not sharded\), got tensor_parallel 0"),
        ({"virtual_pipeline": 2}, "virtual_pipeline 2 interleaves pipeline stages, but pipeline_parallel is 1"),
        ({"sequence_parallel": True}, "sequence_parallel shards activations .*, but tensor_parallel is 1"),
        ({"minibatches": 0}, "expected minibatches ≥ 1"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MegatronLearner.Config(**settings)


def test_ranks_of_a_replica() -> None:
    assert (
        MegatronLearner.ranks_per_replica(
            MegatronLearner.Config(tensor_parallel=2, pipeline_parallel=3, context_parallel=2)
        )
        == 12
    )


def test_the_state_of_another_learner_is_refused() -> None:
    with pytest.raises(
        RunError,
        match=r"learner\.megatron: expected the shards of learner\.megatron in the checkpoint, got optimizer, version",
    ):
        MegatronLearner().load_state_dict({"version": 1, "optimizer": {}})
    with pytest.raises(
        RunError, match=r"expected the optimiser state of a transformers model in the checkpoint, got v"
    ):
        HFLearner().load_state_dict(MegatronLearner.state_dict(SimpleNamespace(version=1)))
