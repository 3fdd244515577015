"""TRL trains with credit graphs, in an environment of its own."""

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.components.models.load import resolve_model_path
from creditgraph.pipeline import ROOT
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from tests.adapters import slow

HERE = Path(__file__).parent
PYTHON = ROOT.parent / ".venv-trl/bin/python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no TRL: tools/other_environment trl"),
    pytest.mark.xdist_group("trl"),
    pytest.mark.slow,
]
MODEL = "model.path=" + resolve_model_path("tiny")
PIECES = ["segmenter.use=segmenter.fixed", "segmenter.tokens=4"]
FROZEN = {"learning_rate": 0.0}  # so that the policy of the last batch is known
RESETS = [
    "sampler.mode=sentence",
    "expander.mode=sentence",
    "sampler.group_size=4",
    "sampler.split=1x2",
    "expander.suffixes=2",
    "--right-above=0.3",
]
# TRL divides by the unbiased standard deviation plus 1e-4.
AS_TRL = ["advantage.unbiased=true", "advantage.eps=1e-4"]
JOBS = {
    "trl_grpo": {"trl": {"loss_type": "grpo"}},
    "trl_dapo": {"trl": {"loss_type": "dapo"}},
    "advantages": {"graph": "grpo", "overrides": AS_TRL, "trl": {"loss_type": "grpo"}},
    "trl_padded": {"trl": {"loss_type": "grpo", "pad_to_multiple_of": 16}},
    "padded": {"graph": "grpo", "overrides": AS_TRL, "trl": {"loss_type": "grpo", "pad_to_multiple_of": 16}},
    "grpo": {"graph": "grpo", "overrides": AS_TRL, "objective": True},
    "dapo": {"graph": "grpo", "overrides": [*AS_TRL, "learner.objective.aggregate=token_mean"], "objective": True},
    "group": {"graph": "grpo", "turns": True},
    "gigpo": {"graph": "gigpo", "overrides": ["advantage.omega=0.5"], "turns": True},
    "turn_gae": {"graph": "gae_turns", "turns": True, "objective": True},
    "s_trace": {"graph": "s_trace", "objective": True},
    "no_trace": {"graph": "s_trace", "overrides": ["learner.objective.config.decay=0"], "objective": True},
    "grpo_std": {"graph": "grpo", "objective": True},
    "trl_experts": {"experts": True, "trl": {"loss_type": "grpo"}},
    "experts": {"graph": "grpo", "overrides": AS_TRL, "objective": True, "experts": True},
    "trl_ratios": {"ratios": True, "trl": {"loss_type": "grpo"}},
    "ratios": {"graph": "grpo", "overrides": AS_TRL, "objective": True, "ratios": True},
    "kl": {"graph": "grpo", "objective": True, "trl": {"beta": 0.1, "top_entropy_quantile": 0.5}},
    "gspo": {"graph": "gigpo", "turns": True, "trl": {"loss_type": "grpo", "importance_sampling_level": "sequence"}},
    "rredcot": {
        "graph": "recipe=toy_rredcot",
        "overrides": [MODEL, *PIECES, "value.value=sum"],
        "trl": FROZEN,
        "branches": True,
    },
    "rredcot_cuts": {
        "graph": "recipe=toy_rredcot",
        "overrides": [MODEL, "segmenter.use=segmenter.entropy_cuts", "segmenter.segments=4"],
        "trl": FROZEN,
    },
    "hicra": {"graph": "hicra", "trl": FROZEN},
    "igpo": {
        "graph": "igpo",
        "overrides": [MODEL, 'value.exit_text=" \\\\boxed{ "', 'value.answer_end=" }"'],
        "turns": True,
        "trl": FROZEN,
    },
    "vineppo": {
        "graph": "vineppo",
        "overrides": [MODEL, *PIECES, "value.continuations=2"],
        "trl": FROZEN | {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2},
    },
    "chat": {
        "graph": "vineppo",
        "overrides": [MODEL, *PIECES, "value.continuations=2"],
        "trl": FROZEN,
        "chat": True,
    },
    "thoughts": {"graph": "vineppo", "overrides": [MODEL, "sampler.mode=line", "value.continuations=1"]},
    "named": {"graph": "rredcot", "trl": FROZEN | {"model_init_kwargs": {"dtype": "float32"}}, "named": True},
    "vineppo_turns": {"graph": "vineppo", "overrides": [MODEL, *PIECES], "turns": True},
    "vineppo_budget": {"graph": "vineppo", "overrides": [MODEL, *PIECES, "value.max_tokens=5"]},
    "rredcot_drawn": {
        "graph": "rredcot",
        "overrides": [
            MODEL,
            *PIECES,
            "value.value=continuation",
            "value.weights=proposal",
            "value.length_normalise=false",
        ],
        "trl": FROZEN,
    },
    "trl_means": {"trl": {"loss_type": "grpo", "scale_rewards": "none"}},
    "one_level": {
        "graph": "spo_tree",
        "overrides": [MODEL, "sampler.segments.branching=[4]", "advantage.max_probability=1"],
        "trl": {"loss_type": "grpo"},
    },
    "rrpo": {"graph": "rrpo", "overrides": [MODEL, *RESETS]},
    "rrpo_vllm": {"graph": "rrpo", "overrides": [MODEL, *RESETS], "vllm": True},
    "srpo": {
        "graph": "srpo",
        "overrides": [MODEL, *RESETS, "localizer.max_tokens=16", "localizer.temperature=0"],
        "trl": FROZEN | {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2},
    },
    "ibpo": {
        "graph": "ibpo",
        "overrides": [MODEL, "sampler.group_size=4", "reviser.references=1", "--right-above=0.2"],
        "objective": True,
        "trl": {"num_generations": 8, "max_completion_length": 60},
    },
    "ibpo_off": {
        "graph": "ibpo",
        "overrides": [
            MODEL,
            "sampler.group_size=4",
            "advantage.shaping=0",
            "advantage.mask=none",
            "advantage.train_revision=false",
            "advantage.raise_edits=true",
        ],
    },
    "treerl": {
        "graph": "treerl",
        "overrides": [
            MODEL,
            "sampler.uncertain.chains=2",
            "sampler.uncertain.points=1",
            "sampler.uncertain.branches=1",
        ],
    },
    "rows": {"graph": "srpo", "overrides": [MODEL, "sampler.mode=sentence", "expander.mode=sentence"]},
    "modes": {"graph": "srpo", "overrides": [MODEL]},
    "budget": {"graph": "rrpo", "overrides": [MODEL, *RESETS, "sampler.max_tokens=5", "expander.max_tokens=5"]},
    "row_turns": {"graph": "rrpo", "overrides": [MODEL, *RESETS], "turns": True},
    "episodes": {"graph": "tree_turns", "overrides": [MODEL]},
    "trace_td": {"graph": "trace_td", "overrides": [MODEL]},
    "gdpo": {"graph": "grpo", "trl": {"multi_objective_aggregation": "normalize_then_sum"}},
}
PLAIN = {
    "graph": "",
    "overrides": [],
    "objective": False,
    "turns": False,
    "trl": {},
    "experts": False,
    "ratios": False,
    "vllm": False,
    "chat": False,
    "named": False,
    "branches": False,
}


def train(folder, jobs, launcher=(), python=PYTHON, settings=None):
    """Writes folder/results.json, or results.json.RANK of each process of a launcher."""
    (folder / "jobs.json").write_text(json.dumps({name: PLAIN | job for name, job in jobs.items()}))
    model = resolve_model_path("tiny")
    command = [python, *launcher, HERE / "trl_train.py", model, folder / "jobs.json", folder / "results.json"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT.parent),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "OMP_NUM_THREADS": "1",
        **(settings or {}),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Name of the job → what it reports."""
    folder = tmp_path_factory.mktemp("trl")
    train(folder, JOBS)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("advantages", "trl_grpo"),
        ("padded", "trl_padded"),
        ("grpo", "trl_grpo"),
        ("dapo", "trl_dapo"),
        ("experts", "trl_experts"),
        ("ratios", "trl_ratios"),
    ],
)
def test_grpo_by_a_graph_trains_as_that_of_trl(trained, ours, theirs):
    # Two iterations over each batch, two micro-batches per step: ratios, denominators and accumulation all count.
    torch.testing.assert_close(trained[ours]["losses"], trained[theirs]["losses"], atol=1e-6, rtol=0)
    torch.testing.assert_close(trained[ours]["weights"], trained[theirs]["weights"], atol=5e-6, rtol=1e-6)
    assert trained[ours]["weights"] != trained["gigpo"]["weights"]


@pytest.mark.parametrize("name", ["group", "gigpo", "turn_gae"])
def test_advantages_equal_loops_over_what_trl_sampled(trained, name):
    seen = trained[name]["seen"]
    mask, rewards, group = seen["mask"], seen["turn_rewards"], seen["group"]
    assert [0 in row for row in mask] == [True] * 8  # what the environment wrote is not trained on
    states = slow.states_of(mask, seen["tokens"])
    expected = {
        "group": lambda: slow.grpo(mask, [sum(r) for r in rewards], group),
        "gigpo": lambda: slow.gigpo(mask, rewards, group, states, omega=0.5),
        "turn_gae": lambda: slow.turn_gae(mask, rewards, group, states),
    }[name]()
    actual = torch.tensor(seen["advantages"])
    torch.testing.assert_close(actual, torch.tensor(expected)[:, : actual.shape[1]], atol=1e-6, rtol=1e-6)
    assert actual.abs().max() > 0.05
    # The table of completions shows the mean over a response's tokens.
    means = actual.sum(1) / torch.tensor(mask).sum(1)
    torch.testing.assert_close(torch.tensor(trained[name]["logged"][-8:]), means, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["rredcot", "rredcot_cuts", "rredcot_drawn", "igpo", "hicra"])
def test_texts_are_scored_by_the_model_that_is_trained(trained, policy, name):
    check_scored(trained[name]["seen"], name, policy)


def test_a_trunk_that_runs_once_gives_its_branches_the_scores_of_rows_of_their_own(trained):
    packed, plain = map(torch.tensor, trained["rredcot"]["branches"])
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)
    assert packed[0].std() > 1
    assert trained["rredcot"]["masks"] is True


def check_scored(seen, name, policy):
    """Advantages are those of a graph whose texts a local policy with the same weights scores."""
    expected, mask = scored(seen, JOBS[name], policy)
    actual = torch.tensor(seen["advantages"])
    expected, mask = expected[:, : actual.shape[1]], mask[:, : actual.shape[1]]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def scored(seen, job, policy):
    """Advantages of a job's graph with a local policy, and which tokens are trained on, both [N, T]."""
    mask, tokens = torch.tensor(seen["mask"]), torch.tensor(seen["tokens"])
    lengths = mask.flip(1).cummax(1).values.sum(1)
    rows = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    context, responses = Jagged.from_rows(seen["prompts"], torch.int32), Jagged.from_rows(rows, torch.int32)
    temperature = seen.get("temperature", 1.0)
    scores = policy.score(context, responses, temperature)
    batch = Rollouts(
        mask=mask,
        tokens=tokens,
        logprobs=scores.logprobs.to_padded(),
        entropies=scores.entropies.to_padded(),
        temperature=temperature,
        rewards=torch.tensor(seen["rewards"]),
        **{key: seen[key] for key in ("group", "turn_rewards", "prompts", "texts", "answers")},
    )
    credit = CreditGraph(job["graph"], *job.get("overrides", []), policy=policy)
    expected = credit(batch)
    assert credit.metrics.get("value/scored_tokens") != 0
    assert credit.metrics.get("value/empty_bank_share", 0) == 0
    within = expected.where(mask != 0, -torch.inf).amax(1) - expected.where(mask != 0, torch.inf).amin(1)
    assert within.max() > 0.01  # tokens of a response differ
    return expected, mask != 0


def vines(seen, policy, reward_of=lambda ids: sum(token % 3 == 0 for token in ids) / len(ids)):
    """Advantages of VinePPO over pieces of four tokens, whose continuations are greedy and so all the same."""
    out = []
    for prompt, tokens, mask, reward in zip(
        *(seen[key] for key in ("prompts", "tokens", "mask", "rewards")), strict=True
    ):
        response = tokens[: sum(mask)]
        values = []
        for start in range(0, len(response), 4):
            request = Requests(
                tokens=Jagged.from_rows([prompt + response[:start]], torch.int32),
                seed=torch.zeros(1, dtype=torch.int64),
                sampling=Sampling(temperature=0.0, max_tokens=12 - start),
            )
            whole = response[:start] + policy.generate(request).tokens.row(0).tolist()
            values.append(reward_of(whole))
        values.append(reward)
        gains = [after - before for before, after in pairwise(values)]
        out.append([gains[i // 4] if i < len(response) else 0.0 for i in range(len(tokens))])
    return torch.tensor(out)


def check_continued(seen, policy, **more):
    """Advantages are those of `vines`."""
    actual = torch.tensor(seen["advantages"])
    expected = vines(seen, policy, **more)[:, : actual.shape[1]]
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    assert actual.unique().numel() > 4


def test_responses_are_continued_as_the_trainer_samples_and_its_functions_verify_them(trained, policy):
    check_continued(trained["vineppo"]["seen"], policy)
    assert "credit/value/continuations" in trained["vineppo"]["metrics"]
    # The trainer's own table has its responses alone.
    assert len(trained["vineppo"]["logged"]) == len(trained["group"]["logged"])
    assert "credit/value/continuations" in trained["thoughts"]["metrics"]
    assert trained["vineppo"]["evaluated"] == [
        "eval_reward",
        "eval_reward_std",
        "eval_rewards/reward/mean",
        "eval_rewards/reward/std",
    ]


def test_functions_get_messages_of_conversations_and_their_own_logs_stay_those_of_the_responses(trained, policy):
    def reward_of(ids):
        return len(policy.tokenizer.decode(ids, skip_special_tokens=True)) % 7 / 6

    chat = trained["chat"]
    check_continued(chat["seen"], policy, reward_of=reward_of)
    assert chat["extra"] == {"role": len(chat["logged"])}
    assert set(chat["counted"]) == {8.0}  # as without a graph: the responses of a batch


def test_a_tree_of_one_level_trains_as_trl_does_on_rewards_less_their_mean(trained):
    torch.testing.assert_close(trained["one_level"]["losses"], trained["trl_means"]["losses"], atol=1e-6, rtol=0)
    torch.testing.assert_close(trained["one_level"]["weights"], trained["trl_means"]["weights"], atol=5e-6, rtol=1e-6)
    assert trained["one_level"]["weights"] != trained["trl_grpo"]["weights"]


def check_reset(seen, size=4):
    """Rows of resets and their advantages, for groups in which everything is known again from what TRL had."""
    rows, rewards = seen["rows"], [sum(t % 3 == 0 for t in ids) / len(ids) for ids in seen["rows"]["tokens"]]
    assert max(rows["inherited"]) > 0
    order = sorted(range(len(rewards)), key=lambda i: rows["prompt"][i])  # a prompt's places follow each other
    assert len(order) == len(seen["mask"])
    assert seen["group"] == [i // size for i in range(len(order))]
    for place, row in enumerate(order):
        tokens, inherited, length = rows["tokens"][row], rows["inherited"][row], len(rows["tokens"][row])
        assert seen["tokens"][place][:length] == tokens
        assert seen["mask"][place] == [int(inherited <= t < length) for t in range(len(seen["mask"][place]))]
        members = [i for i in order if rows["group"][i] == rows["group"][row]]
        kept = rows["tokens"][members[0]][:inherited]
        assert all(rows["tokens"][i][:inherited] == kept for i in members)
        mean = sum(rewards[i] for i in members) / len(members)
        std = (sum((rewards[i] - mean) ** 2 for i in members) / len(members)) ** 0.5
        expected = (rewards[row] - mean) / std if std > 1e-8 else 0.0
        found = torch.tensor(seen["advantages"][place])
        trained = torch.tensor(seen["mask"][place][: len(found)])
        torch.testing.assert_close(found, expected * trained, atol=1e-5, rtol=1e-5)


def test_trl_trains_on_the_rows_of_resets(trained):
    check_reset(trained["rrpo"]["seen"])
    assert {"credit/localizer/step_fraction", "credit/expander/prefix_share"} <= set(trained["srpo"]["metrics"])
    assert trained["srpo"]["evaluated"][0] == "eval_reward"
    assert not [name for name in trained["srpo"]["evaluated"] if "credit" in name]


def test_vllm_samples_and_says_log_probs_for_the_rows(trained):
    # The stand-in samples with the model that is trained, so the ratios to it are one.
    plain, vllm = trained["rrpo"], trained["rrpo_vllm"]
    assert vllm["seen"]["rows"] == plain["seen"]["rows"]
    torch.testing.assert_close(vllm["losses"], plain["losses"], atol=1e-6, rtol=0)
    torch.testing.assert_close(vllm["weights"], plain["weights"], atol=1e-5, rtol=1e-5)


def test_revisions_join_the_batch_and_places_without_a_row_are_not_trained_on(trained):
    seen = trained["ibpo"]["seen"]
    rows = len(seen["rows"]["prompt"])
    assert 4 < rows < 8  # with a revision
    empty = [tokens[1:] == [0] * (len(tokens) - 1) for tokens in seen["tokens"]]
    assert sum(empty) == 8 - rows
    assert not any(any(mask) for mask, e in zip(seen["mask"], empty, strict=True) if e)
    assert torch.tensor(seen["advantages"])[torch.tensor(empty)].abs().max() == 0
    assert {"credit/advantage/edited_share", "credit/ratio_mean"} <= set(trained["ibpo"]["metrics"])
    assert len(set(trained["ibpo"]["losses"])) == 4


def test_without_revisions_and_shaping_ibpo_compares_responses_as_grpo(trained):
    seen = trained["ibpo_off"]["seen"]
    actual = torch.tensor(seen["advantages"])
    expected = torch.tensor(slow.grpo(seen["mask"], seen["rewards"], seen["group"]))
    torch.testing.assert_close(actual, expected[:, : actual.shape[1]], atol=1e-4, rtol=1e-4)
    assert actual.abs().max() > 0.5


def test_trees_branch_where_the_model_was_uncertain(trained):
    check_branches(trained["treerl"]["seen"]["rows"])


def check_branches(rows):
    """Rows with inherited tokens share them with another row of their prompt."""
    branches = [i for i, inherited in enumerate(rows["inherited"]) if inherited]
    assert branches
    for i in branches:
        shared = rows["tokens"][i][: rows["inherited"][i]]
        others = [rows["tokens"][j] for j in range(8) if j != i and rows["prompt"][j] == rows["prompt"][i]]
        assert any(tokens[: len(shared)] == shared for tokens in others)


def test_rows_that_trl_cannot_hold_or_make_are_refused(trained):
    assert "makes 8 rows for a prompt, but num_generations=4" in trained["rows"]["error"]
    assert "localizer.self reads where thoughts end, which another trainer does not record" in trained["modes"]["error"]
    assert "sampler.max_tokens=5 has no effect here" in trained["budget"]["error"]
    assert "it plays episodes of its own" in trained["episodes"]["error"]
    assert "turn_rewards and turn_states have no effect" in trained["row_turns"]["error"]


def test_the_name_of_the_model_is_that_of_the_graphs(trained):
    assert "credit/value/scored_tokens" in trained["named"]["metrics"]


def test_what_cannot_be_continued_or_scored_is_refused(trained):
    assert "with rollout_func what follows is not up to the model alone" in trained["vineppo_turns"]["error"]
    assert "value.max_tokens=5 has no effect here" in trained["vineppo_budget"]["error"]
    assert "another model than the one that is trained" in trained["trace_td"]["error"]


def test_what_the_credit_or_loss_of_a_graph_has_no_part_for_is_refused(trained):
    assert trained["kl"]["error"] == (
        "graph 'grpo': its credit has no part for TRL's beta=0.1 (off: 0.0), top_entropy_quantile=0.5 (off: 1.0). "
        "Switch that off."
    )
    assert "multi_objective_aggregation='normalize_then_sum' (off: 'sum_then_normalize')" in trained["gdpo"]["error"]
    assert "differs within responses, but with importance_sampling_level=sequence" in trained["gspo"]["error"]


def test_the_loss_is_that_of_the_graph(trained):
    assert len({trained[name]["weights"][0] for name in ("trl_grpo", "trl_ratios", "trl_experts")}) == 3
    assert trained["s_trace"]["weights"] != trained["grpo_std"]["weights"]
    assert {"credit/trace_weight", "credit/high_entropy"} <= set(trained["s_trace"]["metrics"])
    # Without decay a trace is the clipped ratio of the token alone.
    torch.testing.assert_close(trained["no_trace"]["weights"], trained["grpo_std"]["weights"], atol=5e-6, rtol=1e-6)
    assert {"credit/advantage/groups", "credit/ratio_mean"} <= set(trained["grpo_std"]["metrics"])


def test_two_processes_credit_groups_of_both(tmp_path, policy):
    record = [f"--record={tmp_path / 'credit.jsonl'}"]
    gigpo = JOBS["gigpo"] | {"overrides": [*JOBS["gigpo"]["overrides"], *record]}
    jobs = {"gigpo": gigpo, "s_trace": JOBS["s_trace"], "vineppo": JOBS["vineppo"], "rredcot": JOBS["rredcot"]}
    jobs["rrpo"] = JOBS["rrpo"] | {"objective": True}
    train(tmp_path, jobs, ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    both = [json.loads((tmp_path / f"results.json.{rank}").read_text()) for rank in (0, 1)]
    for name in jobs:
        assert both[0][name]["weights"] == both[1][name]["weights"]
    resets = [result["rrpo"]["seen"] for result in both]
    assert resets[0]["rows"] == resets[1]["rows"]
    check_reset(resets[0] | {"advantages": resets[0]["advantages"] + resets[1]["advantages"]})
    seen = [result["gigpo"]["seen"] for result in both]
    mask, rewards, group, tokens = (seen[0][key] for key in ("mask", "turn_rewards", "group", "tokens"))
    assert (mask, rewards, group) == tuple(seen[1][key] for key in ("mask", "turn_rewards", "group"))
    expected = torch.tensor(slow.gigpo(mask, rewards, group, slow.states_of(mask, tokens), omega=0.5))
    actual = torch.tensor(seen[0]["advantages"] + seen[1]["advantages"])
    torch.testing.assert_close(actual, expected[:, : actual.shape[1]], atol=1e-6, rtol=1e-6)
    vineppo = torch.tensor([row for result in both for row in result["vineppo"]["seen"]["advantages"]])
    expected_vineppo = vines(both[0]["vineppo"]["seen"], policy)[:, : vineppo.shape[1]]
    torch.testing.assert_close(vineppo, expected_vineppo, atol=1e-6, rtol=1e-6)
    # One of the two writes, each batch once.
    rows = [json.loads(line) for line in (tmp_path / "credit.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == len(rows) // len(mask) - 1 > 0
    for row, numbers, trained in zip(rows[-len(mask) :], expected.tolist(), mask, strict=True):
        found = [a for a, m in zip(row["advantage"], row["mask"], strict=True) if m]
        assert found == pytest.approx([a for a, m in zip(numbers, trained, strict=True) if m], abs=1e-6)
