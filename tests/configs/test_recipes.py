"""Every shipped graph and recipe is sound; settings with a source are as labelled; methods that should agree do."""

import math

import pytest
import torch

from creditgraph.pipeline.app.progress import ACCURACY, REWARD, SAMPLED_TOKENS, STEPS, TRAINED_TOKENS
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import GraphError
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices, read_yaml
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.executor import Executor
from creditgraph.pipeline.run.recording import read_payload
from creditgraph.pipeline.run.run_directory import RunDirectory

RATIO_OBJECTIVES = ("gspo", "gspo_gated", "trace")
PAPERS = ("dapo", "drgrpo", "entropy_8020", "grpo", "grpo_lambda", "gspo", "p_trace", "rrpo", "s_trace", "srpo")


def experiment(recipe, *overrides):
    return build_experiment(compose([f"recipe={recipe}", *overrides]), recipe)


def setting(experiment, path):
    """A setting by dotted path ("learner.objective.config.clip_low"), of a node or of the sections model and run."""
    head, *rest = path.split(".")
    value = getattr(experiment, head) if head in ("model", "run") else experiment.graph[head].config
    for name in rest:
        value = getattr(value, name)
    return value


# --- every shipped file ---


def test_every_shipped_graph_logs_what_commands_show():
    for name in list_choices("graph", [CONFIG_DIR]):
        teacher = ["teacher.model=tiny"] if name == "distill" else []
        nodes = build_experiment(compose([f"graph={name}", *teacher])).graph.nodes
        logged = {f"{node.name}/{metric.name}" for node in nodes for metric in node.cls.metrics}
        assert logged >= {ACCURACY, SAMPLED_TOKENS, TRAINED_TOKENS, STEPS}, name
        if name not in ("distill", "intervention"):  # these have no rewards
            assert logged >= {REWARD, "rewards/correct"}, name


@pytest.mark.parametrize("method", PAPERS)
def test_each_paper_has_a_graph_a_toy_recipe_and_a_full_size_recipe(method):
    assert (CONFIG_DIR / "graph" / f"{method}.yaml").exists()
    recipes = list_choices("recipe", [CONFIG_DIR])
    assert f"toy_{method}" in recipes
    full = [n for n, file in recipes.items() if not n.startswith("toy_") and f"/graph: {method}," in file.read_text()]
    assert full
    for name in full:
        assert "ot yet run on a GPU" in recipes[name].read_text(), name


@pytest.mark.parametrize("group", ["graph", "recipe", "setup"])
def test_every_file_says_what_it_is(group):
    for name, file in list_choices(group, [CONFIG_DIR]).items():
        lines = file.read_text().splitlines()
        assert lines[0] == "# @package _global_", name
        assert lines[1].startswith("# "), f"{group}/{name}.yaml: no line that says what it is"
        if group == "recipe":
            assert len(lines) <= 60, f"{name}: {len(lines)} lines"


@pytest.mark.parametrize(
    "recipe", ["gspo", "gspo_token", "grpo_lambda", "grpo_lambda_both", "p_trace", "s_trace", "ibpo"]
)
def test_ratio_methods_take_several_steps_per_batch(recipe):
    learner = experiment(f"toy_{recipe}").graph["learner"].config
    assert learner.objective.use in RATIO_OBJECTIVES
    assert learner.minibatches == 4  # with one, every ratio is 1 and the method is not tested


FULL_SIZE = [name for name in list_choices("recipe", [CONFIG_DIR]) if not name.startswith("toy_")]


@pytest.mark.parametrize("recipe", FULL_SIZE)
def test_full_size_recipes_with_a_ratio_recompute_old_logprobs(recipe):
    # The engine's log-probs differ from the learner's by rounding, which ratios of many tokens add up.
    learner = experiment(recipe).graph["learner"].config
    assert learner.old_logprobs == "recompute" or learner.objective.use == "reinforce"


# --- settings that the comments of a recipe or its graph give a source ---

SOURCED = {
    "gspo_qwen3_30b_a3b": {
        "model.path": "Qwen/Qwen3-30B-A3B-Base",
        "learner.objective.use": "gspo",
        "learner.objective.config.clip_low": 3e-4,
        "learner.objective.config.clip_high": 4e-4,
        "learner.objective.kl.coefficient": 0.0,
        "learner.objective.aggregate": "seq_mean_token_mean",
        "learner.minibatches": 4,
    },
    "grpo_lambda_qwen2_5_7b_instruct": {
        "learner.objective.config.decay": 0.99,
        "learner.objective.config.style": "both",
        "learner.objective.config.clip": "traced",
        "learner.objective.config.min_advantage": -0.1,
        "learner.minibatches": 4,
    },
    "p_trace_qwen3_4b": {
        "model.path": "Qwen/Qwen3-4B",
        "learner.objective.config.clip": "current",
        "learner.objective.entropy_mask.keep": 1.0,
    },
    "s_trace_qwen3_4b": {
        "model.path": "Qwen/Qwen3-4B",
        "learner.objective.config.clip": "current",
        "learner.objective.entropy_mask.keep": 0.2,
        "learner.objective.entropy_mask.where": "trace",
    },
    "entropy_8020_qwen3_8b_base": {
        "model.path": "Qwen/Qwen3-8B-Base",
        "learner.objective.entropy_mask.keep": 0.2,
        "learner.objective.entropy_mask.scope": "batch",
        "learner.objective.entropy_mask.where": "loss",
        "learner.objective.config.clip_high": 0.28,
        "learner.objective.kl.coefficient": 0.0,
        "sampler.max_tokens": 20480,
        "learner.optimizer.lr": 1e-6,
    },
    "dapo_qwen2_5_32b": {
        "model.path": "Qwen/Qwen2.5-32B",
        "learner.objective.config.clip_low": 0.2,
        "learner.objective.config.clip_high": 0.28,
        "learner.objective.aggregate": "token_mean",
        "learner.objective.kl.coefficient": 0.0,
        "learner.minibatches": 16,
        "learner.optimizer.lr": 1e-6,
        "learner.optimizer.warmup": 320,
        "sampler.groups": 512,
        "sampler.group_size": 16,
        "sampler.max_tokens": 20480,
        "overlong.max_length": 20480,
        "overlong.buffer": 4096,
    },
    "drgrpo_qwen2_5_math_7b": {
        "model.path": "Qwen/Qwen2.5-Math-7B",
        "advantage.normalize": "mean",
        "learner.objective.aggregate": "constant",
        "learner.objective.constant_length": 3000,
        "learner.objective.kl.coefficient": 0.0,
        "sampler.group_size": 8,
        "sampler.max_tokens": 3000,
        "learner.optimizer.lr": 1e-6,
    },
    "grpo_deepseek_math_7b": {
        "model.path": "deepseek-ai/deepseek-math-7b-instruct",
        "advantage.normalize": "std",
        "learner.objective.aggregate": "seq_mean_token_mean",
        "learner.objective.kl.coefficient": 0.04,
        "learner.objective.kl.estimator": "k3",
        "learner.minibatches": 1,
        "sampler.group_size": 64,
        "sampler.max_tokens": 1024,
        "learner.optimizer.lr": 1e-6,
    },
} | {
    recipe: {
        "run.iterations": 24,
        "run.seed": 42,
        "prompts.batch": 32,
        "sampler.split": "1x4",
        "sampler.temperature": 0.7,
        "sampler.top_p": 0.95,
        "sampler.max_tokens": 5120,
        "sampler.thoughts.max_tokens": 256,
        "sampler.thoughts.max_thoughts": 20,
        "sampler.thoughts.ends_at_eos": False,
        "expander.temperature": 0.7,
        "expander.thoughts.max_thoughts": 20,
        "evaluator.thoughts.ends_at_eos": False,
        "advantage.normalize": "std_exact",
        "learner.objective.use": "reinforce",
        "learner.objective.aggregate": "seq_mean_token_mean",
        "learner.lora.rank": 64,
        "learner.lora.alpha": 64,
        "learner.minibatches": 4,
        "learner.optimizer.lr": 5e-5,
        "learner.optimizer.weight_decay": 0.01,
        "learner.optimizer.grad_clip": 1.0,
    }
    for recipe in (
        "srpo_qwen2_5_14b_instruct",
        "srpo_olmo3_7b_instruct",
        "rrpo_qwen2_5_14b_instruct",
        "rrpo_olmo3_7b_instruct",
    )
}


@pytest.mark.parametrize("recipe", SOURCED)
def test_settings_with_a_source(recipe):
    checked = experiment(recipe)
    assert {path: setting(checked, path) for path in SOURCED[recipe]} == SOURCED[recipe]


def test_batch_of_grpo():
    checked = experiment("grpo_deepseek_math_7b")
    assert checked.graph["prompts"].config.batch * checked.graph["sampler"].config.group_size == 1024


def test_localiser_of_srpo_is_sampled_as_in_the_release():
    checked = experiment("srpo_qwen2_5_14b_instruct").graph["localizer"].config
    assert (checked.temperature, checked.top_p, checked.max_tokens) == (0.3, 0.95, 4096)


# --- settings that move together ---


def test_limits_of_the_evaluator_are_the_samplers():
    for name in list_choices("recipe", [CONFIG_DIR]):
        values = compose([f"recipe={name}", "sampler.max_tokens=99991"])
        assert values["evaluator"]["max_tokens"] == 99991, name
        toy = name.startswith("toy_")
        assert not toy or values["evaluator"].get("mode") == values["sampler"].get("mode"), name


@pytest.mark.parametrize(
    ("recipe", "node"), [("toy_srpo", "expander"), ("rrpo_olmo3_7b_instruct", "expander"), ("toy_ibpo", "reviser")]
)
def test_second_samplers_follow_the_first(recipe, node):
    changed = {"mode": "plain", "temperature": 0.3, "top_p": 0.8, "max_tokens": 60}
    overrides = [f"sampler.{name}={value}" for name, value in changed.items()]
    graph = experiment(recipe, *overrides, "sampler.thoughts.max_thoughts=3").graph
    for setting in (*changed, "thoughts"):
        assert getattr(graph[node].config, setting) == getattr(graph["sampler"].config, setting)
    assert graph[node].config.thoughts.max_thoughts == 3
    assert graph["evaluator"].config.thoughts == graph["sampler"].config.thoughts or node == "reviser"
    if "localizer" in graph and recipe == "toy_srpo":
        assert graph["localizer"].config.top_p == 0.8


@pytest.mark.parametrize(
    ("recipe", "override", "problem"),
    [
        (
            "toy_srpo",
            "sampler.split=1x8",
            "expander.suffixes: expected 8, as in 'sampler', which samples 'failures', got 4;",
        ),
        ("toy_rrpo", "expander.temperature=0.5", "expander.temperature: expected 1.0, as in 'sampler', .* got 0.5;"),
        ("toy_rrpo", "expander.top_p=0.5", "expander.top_p: expected 1.0, as in 'sampler', .* got 0.5; set both"),
        (
            "toy_ibpo",
            "reviser.mode=plain",
            "reviser.mode: expected thought, as in 'sampler', .* 'trajectories', got plain",
        ),
    ],
)
def test_settings_that_must_agree_are_refused_apart(recipe, override, problem):
    with pytest.raises(GraphError, match=problem):
        experiment(recipe, override)


# --- methods differ by a node or a setting ---


def test_the_clip_ablation_changes_the_objective_alone():
    plain, steps, clip = (compose([f"recipe=toy_srpo{suffix}"]) for suffix in ("", "_4_steps", "_clip"))
    for values in (plain, steps, clip):
        del values["recipe"], values["run"]["name"]
    assert clip["learner"].pop("objective")["use"] == "ppo_clip"
    assert clip == steps
    assert steps["learner"].pop("minibatches") == 4
    assert steps == plain


@pytest.mark.parametrize("method", ["gspo", "grpo_lambda", "p_trace", "s_trace"])
def test_ratio_methods_are_grpo_but_for_the_learners_settings(method):
    nodes = {name: read_yaml(CONFIG_DIR / "graph" / f"{name}.yaml")["nodes"] for name in ("grpo", method)}
    for part in nodes.values():
        part["learner"].pop("config")
    assert nodes[method] == nodes["grpo"]


@pytest.mark.parametrize(
    ("left", "right", "node"), [("rrpo", "srpo", "localizer"), ("dapo", "entropy_8020", "learner")]
)
def test_graphs_differ_by_one_node(left, right, node):
    a, b = (read_yaml(CONFIG_DIR / "graph" / f"{name}.yaml")["nodes"] for name in (left, right))
    assert {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)} == {node}


# --- one learner step on one recorded batch ---


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(trajectories, credit) of one iteration of toy_s_trace on the embedded task, read back from its records.

    The iteration also trains on what the engine gave, which no Parquet file has touched: a trace saves offsets for its
    backward pass.
    """
    chosen = [f"run.root={tmp_path_factory.mktemp('runs')}", "run.iterations=1", "run.device=cpu", "prompts.batch=8"]
    made = experiment("toy_s_trace", *chosen, "evaluator.num_problems=1")
    with (
        RunDirectory.open(made.run_path, made.resolved) as run,
        Executor(made.graph, made.run, model=made.model, data=made.data, run=run) as ex,
    ):
        ex.setup()
        ex.restore()
        ex.run()
    read = [
        read_payload(made.run_path / "record" / name / "000000.parquet")
        for name in ("sampler.trajectories", "advantage.credit")
    ]
    assert bool((read[1].advantage.values != 0).any())
    return read


@pytest.fixture(scope="module")
def train(recorded):
    """train(recipe, *overrides) → (weights, metrics, Adam's first moments) after one run of that recipe's learner on
    the recorded batch."""

    def once(recipe, *overrides):
        checked = experiment(recipe, *overrides)
        node = checked.graph["learner"]
        learner = node.cls(node.config)
        learner.setup(Context(node="learner", iterations=1, device="cpu", model=checked.model))
        out = learner.run(trajectories=recorded[0], credit=recorded[1])
        moments = {name: m["exp_avg"] for name, m in learner.state_dict()["optimizer"]["moments"].items()}
        return out.weights.tensors, out.report.metrics, moments

    return once


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def assert_close(a, b, share):
    """Equal up to a share of the whole's norm."""
    norm = math.sqrt(sum(float((x**2).sum()) for x in a.values()))
    off = math.sqrt(sum(float(((a[n] - b[n]) ** 2).sum()) for n in a))
    assert norm > 0
    assert off <= share * norm, f"differ by {off / norm:.2e} of the norm"


GRPO4 = ("toy_grpo", "learner.minibatches=4")
NO_DECAY = "learner.objective.config.decay=0"
ONE_STEP = "learner.minibatches=1"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("toy_s_trace", "learner.objective.entropy_mask.keep=1"), ("toy_p_trace",)),
        (("toy_s_trace", NO_DECAY), GRPO4),
        (("toy_p_trace", NO_DECAY), GRPO4),
        (("toy_grpo_lambda", NO_DECAY, "learner.objective.config.min_advantage=null"), GRPO4),
        (("toy_entropy_8020", "learner.objective.entropy_mask.keep=1"), ("toy_dapo",)),
    ],
)
def test_special_cases_are_the_other_method_to_the_bit(train, left, right):
    assert same(train(*left)[0], train(*right)[0])


def test_gspo_token_is_gspo_at_equal_advantages(train):
    a, b = train("toy_gspo"), train("toy_gspo_token")
    assert a[1]["clip_fraction"] == pytest.approx(b[1]["clip_fraction"], abs=1e-3)
    assert_close(a[2], b[2], share=1e-3)


def test_in_one_step_all_ratios_are_one_and_the_gradient_is_grpos(train):
    _, metrics, moments = train("toy_gspo", ONE_STEP)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert_close(moments, train("toy_grpo")[2], share=1e-3)


def test_in_one_step_the_clip_of_srpo_changes_nothing(train):
    assert_close(train("toy_srpo_clip", ONE_STEP)[2], train("toy_srpo")[2], share=1e-3)
    assert not same(train("toy_srpo_clip")[0], train("toy_srpo_4_steps")[0])


def test_the_methods_are_not_the_same(train):
    names = ("grpo_lambda", "grpo_lambda_both", "gspo", "p_trace", "s_trace")
    trained = {name: train(f"toy_{name}") for name in names} | {"grpo": train(*GRPO4)}
    for left in trained:
        for right in trained:
            assert left == right or not same(trained[left][0], trained[right][0]), (left, right)
    # Differentiated traces scale a token's gradient by about 1/(1 − d), less where the response ends; S-trace by the
    # kept share of that.
    scale = {name: trained[name][1]["gradient_scale"] for name in ("grpo_lambda", "p_trace", "s_trace")}
    assert scale["p_trace"] == pytest.approx(scale["grpo_lambda"], rel=1e-4)
    assert 1 < scale["s_trace"] < 0.5 * scale["p_trace"]
    assert trained["gspo"][1]["clip_fraction"] > trained["grpo"][1]["clip_fraction"]
