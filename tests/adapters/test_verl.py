"""verl's own functions call credit graphs through its registries, in an environment of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.components.engine.served.addresses import free_port
from creditgraph.components.models.load import resolve_model_path
from creditgraph.pipeline import ROOT
from creditgraph.pipeline.core.jagged import Jagged
from tests.adapters import asked, slow
from tests.adapters.tiny_server import tiny_server

HERE = Path(__file__).parent
PYTHON = ROOT.parent / ".venv-verl/bin/python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no verl: tools/other_environment verl"),
    pytest.mark.slow,
]
MASK = [[1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0, 0]]
UID = ["a", "b", "a", "b"]
PROMPTS = {"a": [1, 2], "b": [3]}
# Rows 1 and 3, of group "b", read the same before their second turn.
TOKENS = [[5, 5, 6, 7, 5, 5, 0], [5, 5, 5, 8, 5, 0, 0], [5, 6, 5, 5, 5, 5, 5], [5, 5, 8, 5, 0, 0, 0]]
LENGTHS = [6, 5, 7, 4]
REWARDS = [[0.3, 1.0], [0.0, 0.5], [0.0, 1.0], [0.25, 0.0]]  # of each turn, at its last token
# By hand: of two rewards the larger has +1, the smaller −1; the first turn has its own and the outcome's, the last the
# outcome's alone. Group "a": .3 and 0, then 1.3 and 1; group "b": 0 and .25, then .5 and .25.
MT_GRPO = [[2.0, 1.0], [0.0, 1.0], [-2.0, -1.0], [0.0, -1.0]]


def outputs():
    """Each row of MASK as a session of two outputs, out of order, with a penalty per token; and their places."""
    kl = -0.1 * torch.rand(4, 7, generator=torch.Generator().manual_seed(1)) * torch.tensor(MASK)
    names = ("keys", "uid", "prompts", "responses", "response_mask", "token_level_scores", "token_level_rewards")
    out = {name: [] for name in names}
    places = []
    for i, runs in enumerate(slow.turns(MASK)):
        for k, (begin, end) in enumerate([(0, runs[1][0]), (runs[1][0], 7)]):
            row = torch.zeros(3, 7)
            row[0, : end - begin] = torch.tensor(MASK[i][begin:end])
            row[1, int(row[0].nonzero().max())] = sum(REWARDS[i])  # verl copies the last output's score to all
            row[2, : end - begin] = kl[i, begin:end]
            out["keys"].append(f"{UID[i]}_{i}_{k}")
            out["uid"].append(UID[i])
            out["prompts"].append(PROMPTS[UID[i]] + TOKENS[i][:begin])
            out["responses"].append((TOKENS[i][begin:end] + [0] * 7)[:7])
            for name, values in zip(names[4:], (row[0], row[1], row[1] + row[2]), strict=True):
                out[name].append(values.tolist())
            places.append((i, begin, end))
    order = [5, 0, 3, 6, 1, 7, 2, 4]
    return {name: [values[j] for j in order] for name, values in out.items()}, [places[j] for j in order], kl


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 7, generator=generator)
    rewards = torch.zeros(4, 7)
    for i, runs in enumerate(slow.turns(MASK)):
        for (_, end), reward in zip(runs, REWARDS[i], strict=True):
            rewards[i, end - 1] = reward
    return {
        "token_level_rewards": rewards.tolist(),
        "response_mask": MASK,
        "uid": UID,
        "states": [["start", "left"], ["start", "x"], ["start", "left"], ["start", "x"]],
        "old_log_prob": old.tolist(),
        "log_prob": (old + 0.3 * torch.randn(4, 7, generator=generator)).tolist(),
        "advantages": torch.randn(4, 7, generator=generator).tolist(),
        "sessions": outputs()[0],
        "responses": TOKENS,
        "prompts": [[0] * (2 - len(PROMPTS[uid])) + PROMPTS[uid] for uid in UID],
        "attention_mask": [
            [int(uid == "a"), 1] + [int(t < n) for t in range(7)] for uid, n in zip(UID, LENGTHS, strict=True)
        ],
        "values": (values := torch.randn(4, 7, generator=generator)).tolist(),
        "queue": {
            "keys": [f"{uid}_{i}_0" for i, uid in enumerate(UID)],
            "uid": UID,
            "prompts": [PROMPTS[uid] for uid in UID],
            **{
                name: [row[:n] for row, n in zip(rows, LENGTHS, strict=True)]
                for name, rows in (
                    ("responses", TOKENS),
                    ("response_mask", MASK),
                    ("rm_scores", rewards.tolist()),
                    ("values", values.tolist()),
                )
            },
        },
    }


# Two responses of the embedded model's tokens, of which all are trained on.
ASKED = {
    "keys": ["c_0_0", "c_1_0"],
    "uid": ["c", "c"],
    "prompts": [[46, 3]] * 2,
    "responses": [[3, 4, 44, 7, 45], [6, 7, 8, 44, 9]],
    "response_mask": [[1] * 5] * 2,
    "rm_scores": [[0.0] * 4 + [1.0], [0.0] * 5],
    "old_log_probs": [[-0.5, -0.25, -1.0, -0.75, -0.125]] * 2,
    "reward_model": [{"ground_truth": "4"}] * 2,
    "data_source": ["lighteval/MATH"] * 2,
    "extra_info": [{"index": 3}] * 2,
    "multi_modal_inputs": [{}] * 2,
}
TEXTS = [[[46, 3, 9], [46], [46, 5]], [[3, 4], [6, 7, 8, 44], [9]]]  # three are no whole micro-batches
ENTROPY = [[0.5, 1.5, 0.25, 0.125, 1.0], [0.75, 0.5, 0.25, 2.0, 0.125]]
GRAPHS = {
    "vineppo": [
        *(
            "segmenter.use=segmenter.fixed",
            "segmenter.tokens=2",
            "verifier.use=verifier.exact",
            "value.continuations=1",
        ),
        *("value.temperature=0", "value.max_tokens=12"),
    ],
    "distill": ["teacher.model=tiny"],
}


def of_asked(**further):
    """What a graph gets of `ASKED`."""
    return Rollouts(
        mask=torch.tensor(ASKED["response_mask"]),
        rewards=torch.tensor(ASKED["rm_scores"]),
        group=ASKED["uid"],
        tokens=torch.tensor(ASKED["responses"]),
        prompts=ASKED["prompts"],
        answers=["4", "4"],
        **further,
    )


def test_graphs_that_ask_a_server_get_its_prompts_answers_and_log_probs(found, policy):
    batch = of_asked(logprobs=torch.tensor(ASKED["old_log_probs"]))
    for name, settings in GRAPHS.items():
        expected = CreditGraph(name, "model=tiny", *settings, policy=policy)(batch)
        assert expected.any()
        for advantages in found["asked"][name]:
            torch.testing.assert_close(torch.tensor(advantages), expected, atol=1e-5, rtol=1e-5)


def test_entropies_that_verls_queue_has_mark_tokens(found):
    expected = CreditGraph("hicra")(of_asked(entropies=torch.tensor(ENTROPY)))
    assert len(set(expected[0].tolist())) == 2
    torch.testing.assert_close(torch.tensor(found["asked"]["hicra"]), expected)
    assert "it reads entropies, but the trainer gives none" in found["asked"]["no entropies"]


def test_verls_own_workers_score_texts_at_its_temperature(found, policy):
    expected = CreditGraph("recipe=toy_rredcot", *asked.CUT, policy=policy)(of_asked(temperature=0.7))
    assert len(set(expected.flatten().tolist())) > 3
    of_worker = found["asked"]["scored"]
    scores = policy.score(*(Jagged.from_rows(rows, torch.int32) for rows in TEXTS), 0.7)
    for rows, known in zip(of_worker["texts"], (scores.logprobs, scores.entropies), strict=True):
        torch.testing.assert_close(Jagged.from_rows(rows).values, known.values, atol=1e-5, rtol=1e-5)
    for advantages in of_worker["credit"]:
        torch.testing.assert_close(torch.tensor(advantages), expected, atol=1e-5, rtol=1e-5)


def test_verls_own_servers_are_asked_and_its_rewards_verify(found, policy, tmp_path):
    asked_of = found["asked"]
    assert "it continues responses, but the servers of this trainer sleep when advantages are" in asked_of["asleep"]
    assert "it reads texts with the model, but the prompts have images" in asked_of["images"]
    assert "servers give log-probs at temperature 1, but this trainer samples at 0.5. Set" in asked_of["colder"]
    assert "Set actor_rollout_ref.actor.policy_loss.loss_mode=creditgraph:s_trace." in asked_of["no loss"]
    assert "verl's rewards are those of a model, which is not asked here" in asked_of["of a model"]
    (tmp_path / "mine.py").write_text(REWARD.format(name="reward", arguments="response", text="response"))
    expected = {}
    for name, verifier in (
        ("served", ["verifier.use=verifier.exact"]),
        ("custom", ["verifier.use=verifier.function", f"verifier.function={tmp_path / 'mine.py'}:reward"]),
    ):
        settings = [s for s in GRAPHS["vineppo"] if not s.startswith("verifier")]
        graph = CreditGraph("vineppo", "model=tiny", *settings, *verifier, policy=policy)
        expected[name] = graph(of_asked())
        torch.testing.assert_close(torch.tensor(asked_of[name]), expected[name], atol=1e-5, rtol=1e-5)
    assert not expected["served"].equal(expected["custom"])


REWARD = "def {name}({arguments}, **_):\n    return len({text}.rstrip()) % 7 / 8\n"


@pytest.fixture(scope="module")
def found(batch, tmp_path_factory):
    with tiny_server() as server:
        where = ["model=tiny", f"--endpoint={server.url}/v1", "--model=tiny"]
        graphs = {name: [*settings, *where] for name, settings in GRAPHS.items()}
        mine = tmp_path_factory.mktemp("reward") / "mine.py"
        mine.write_text(REWARD.format(name="score", arguments="solution_str", text="solution_str"))
        asked_of = {
            "columns": ASKED,
            "graphs": graphs,
            "served": ["model=tiny", *GRAPHS["vineppo"][:2], "value.continuations=1"],
            "servers": [server.url.removeprefix("http://")] * 2,
            "function": str(mine),
            "scored": asked.CUT,
            "texts": TEXTS,
            "entropy": ENTROPY,
            "model": str(resolve_model_path("tiny")),
            "port": free_port(),
        }
        return hooked(batch | {"asked": asked_of}, tmp_path_factory)


def hooked(batch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    (folder / "batch.json").write_text(json.dumps(batch))
    given = {"PYTHONPATH": str(ROOT.parent), "VERL_USE_EXTERNAL_MODULES": "creditgraph.adapters.verl"}
    command = [PYTHON, HERE / "verl_hooks.py", folder / "batch.json", folder / "out.json"]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text()) | {"folder": folder}


def test_estimators_equal_loops(found, batch):
    totals = [sum(r) for r in REWARDS]
    unknown = [["start", f"{i}"] for i in range(4)]
    expected = {
        "creditgraph:grpo": slow.grpo(MASK, totals, UID),
        "creditgraph:gigpo": slow.gigpo(MASK, REWARDS, UID, unknown, omega=1.0),
        "mine": slow.gigpo(MASK, REWARDS, UID, batch["states"], omega=0.5),
    }
    for name, advantages in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(advantages), atol=1e-6, rtol=1e-6)
    turns = torch.tensor(slow.spread(MASK, MT_GRPO))
    torch.testing.assert_close(torch.tensor(found["creditgraph:mt_grpo"]), turns, atol=1e-4, rtol=1e-4)
    # verl's own divides by the unbiased standard deviation, of two rewards √2 of the other.
    torch.testing.assert_close(
        torch.tensor(found["grpo"]) * 2**0.5, torch.tensor(found["creditgraph:grpo"]), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("of", ["sessions", "rollouts"])  # of verl, and of Agent Lightning
def test_the_outputs_of_a_session_are_steps_of_one_response_with_one_score(found, of):
    _, places, rewards = outputs()
    for i, runs in enumerate(slow.turns(MASK)):
        rewards[i, runs[1][1] - 1] += sum(REWARDS[i])
    for name in ("grpo", "gigpo"):
        rollouts = Rollouts(mask=torch.tensor(MASK), rewards=rewards, group=UID, tokens=torch.tensor(TOKENS))
        expected = CreditGraph(name)(rollouts)
        for row, (i, begin, end) in zip(found[f"{of} creditgraph:{name}"], places, strict=True):
            torch.testing.assert_close(torch.tensor(row[: end - begin]), expected[i, begin:end], atol=1e-6, rtol=1e-6)
            assert not any(row[end - begin :])
    # verl's own reads the last output alone, whose penalty is not all of it; or each output as a response.
    assert found[f"{of} grpo"] != found[f"{of} creditgraph:grpo"]


def test_the_batch_of_a_trainer_has_token_ids_and_values_too(found, batch):
    read = [["start", text] for text in ("6 7", "8", "6", "8")]
    advantages = torch.tensor(slow.gigpo(MASK, REWARDS, UID, read, omega=1.0))
    assert not torch.allclose(advantages, torch.tensor(found["creditgraph:gigpo"]))  # states are unknown there
    mask, values = torch.tensor(MASK), torch.tensor(batch["values"])
    rewards = torch.tensor(batch["token_level_rewards"])
    critic = CreditGraph("ppo")(Rollouts(mask=mask, rewards=rewards, group=UID, values=values))
    for name, expected, returns in (
        ("gigpo", advantages, advantages + values * mask),
        ("ppo", critic, critic + values * mask),
    ):
        got = torch.tensor(found[f"batch creditgraph:{name}"])
        torch.testing.assert_close(got, torch.stack([expected, returns]), atol=1e-6, rtol=1e-6)
        queue = found["queue recorded" if name == "gigpo" else "queue creditgraph:ppo"]
        for i, n in enumerate(LENGTHS):
            assert queue["advantages"][i] == pytest.approx(expected[i, :n].tolist(), abs=1e-6)
            assert queue["returns"][i] == pytest.approx(returns[i, :n].tolist(), abs=1e-6)


def test_what_a_graph_credits_in_verl_is_recorded_with_its_tokens(found):
    rows = [json.loads(line) for line in (found["folder"] / "credit.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [row[:n] for row, n in zip(TOKENS, LENGTHS, strict=True)]
    assert [row["prompt_ids"] for row in rows] == [PROMPTS[uid] for uid in UID]
    for row, advantages in zip(rows, found["queue recorded"]["advantages"], strict=True):
        assert row["advantage"] == pytest.approx(advantages, abs=1e-6)


def test_a_graph_that_cannot_run_here_says_so(found):
    assert found["creditgraph:srpo"].startswith("ConfigError: graph 'srpo': it samples responses of its own")
    assert "its loss needs entropies" in found["creditgraph:s_trace token-mean"]
    assert "geo_mean averages the advantages of a response" in found["geo_mean token-mean"]
    assert found["geo_mean of rows"] != 0.0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_clipped_objective_equals_verls_own(found, mode):
    loss, gradient, metrics = found[f"creditgraph:grpo {mode}"]
    theirs = found[f"vanilla {mode}"]
    assert loss == pytest.approx(theirs[0], abs=1e-6)
    torch.testing.assert_close(torch.tensor(gradient), torch.tensor(theirs[1]), atol=1e-6, rtol=1e-6)
    assert "actor/ratio_mean" in metrics
    assert found[f"creditgraph:p_trace {mode}"][1] != gradient
