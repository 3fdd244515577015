"""SkyRL's own functions call credit graphs through its registries and its trainer's step, in verl's environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from creditgraph.adapters.estimator import Loss
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.components.models.load import resolve_model_path
from creditgraph.pipeline import ROOT
from tests.adapters import asked, slow
from tests.adapters.tiny_server import tiny_server

HERE = Path(__file__).parent
PYTHON = ROOT.parent / ".venv-verl/bin/python"
LENGTHS = [6, 5, 7, 4]
WIDTH = max(LENGTHS)
MASKS = [[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1]]
UID = ["a", "b", "a", "b"]
REWARDS = [[0.3, 1.0], [0.0, 0.5], [0.0, 1.0], [0.25, 0.0]]  # of each turn, at its last token
# By hand: of two rewards the larger has +1, the smaller −1; the first turn has its own and the outcome's, the last the
# outcome's alone. Group "a": .3 and 0, then 1.3 and 1; group "b": 0 and .25, then .5 and .25.
MT_GRPO = [[2.0, 1.0], [0.0, 1.0], [-2.0, -1.0], [0.0, -1.0]]
# What the environment wrote in the gap before the second turn: rows 1 and 3, of group "b", read the same.
GAPS = [[7, 7], [8], [7], [8]]
GRAPHS = {"vineppo": [*asked.CUT, "value.continuations=1"], "recipe=toy_rredcot": asked.CUT}
# The graphs whose loss a hook with parts of a batch can call.
LOSSES = [
    "cispo",
    "dapo",
    "drgrpo",
    "fipo",
    "gae_turns",
    "gigpo",
    "grpo",
    "grpo_lambda",
    "grpo_turns",
    "gspo",
    "hicra",
    "maxrl",
    "mt_grpo",
    "p_trace",
    "ppo",
    "turn_ppo",
    "vapo",
]


def right(rows):
    """Rows in a tensor that is padded on the left."""
    return torch.tensor([[0.0] * (WIDTH - len(row)) + list(row) for row in rows])


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    rewards, responses = [], []
    for mask, given, gap in zip(MASKS, REWARDS, GAPS, strict=True):
        row, tokens, ends = [0.0] * len(mask), [5] * len(mask), [end for _, end in slow.turns([mask])[0]]
        for end, reward in zip(ends, given, strict=True):
            row[end - 1] = reward
        tokens[ends[0] : ends[0] + len(gap)] = gap
        rewards.append(row)
        responses.append(tokens)
    return {
        "prompts": [[1, 2] if uid == UID[0] else [1, 2, 3, 4] for uid in UID],
        "responses": responses,
        "rewards": rewards,
        "masks": MASKS,
        "uid": UID,
        "logprobs": [(-torch.rand(n, generator=generator)).tolist() for n in LENGTHS],
        "values": [torch.randn(n, generator=generator).tolist() for n in LENGTHS],
        # With the row that SkyRL adds to fill a batch.
        "advantages": torch.randn(5, WIDTH, generator=generator).tolist(),
        "moved": (0.3 * torch.randn(5, WIDTH, generator=generator)).tolist(),
        "asked": {
            "prompts": [asked.PROMPT] * 2,
            "responses": asked.RESPONSES,
            "rewards": [[0.0] * 4 + [reward] for reward in asked.REWARDS],
            "masks": [[1] * 5] * 2,
            "uid": ["a", "a"],
            "logprobs": asked.LOGPROBS,
            "values": [[0.0] * 5] * 2,
        },
    }


@pytest.fixture(scope="module")
def found(batch, tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("no SkyRL: tools/other_environment verl")
    with tiny_server() as server:
        folder = tmp_path_factory.mktemp("skyrl")
        where = [f"--endpoint={server.url}/v1", "--model=tiny"]
        served = {"url": server.url, "graphs": GRAPHS, "batch": batch["asked"] | {"uid": ["0", "0"]}}
        served |= {"where": where, "model": resolve_model_path("tiny")}
        teacher = [*asked.SCORED["distill"], *where]
        given = batch | {"settings": [*asked.settings_of(folder), *where], "served": served, "teacher": teacher}
        out = hooked(given, folder)
        return out | {"requests": [body for _, body, _ in server.requests]}


def hooked(batch, folder):
    (folder / "batch.json").write_text(json.dumps(batch))
    given = {"PYTHONPATH": os.pathsep.join([str(ROOT.parent), str(HERE / "skyrl_python")])}
    command = [PYTHON, HERE / "skyrl_hooks.py", folder / "batch.json", folder / "out.json"]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
def test_a_graph_continues_responses_at_a_server(found, policy, tmp_path):
    torch.testing.assert_close(torch.tensor(found["asked"])[:2], asked.expected(tmp_path, policy), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_teacher_at_a_server_judges_the_tokens_by_skyrls_log_probs(found, policy):
    graph = CreditGraph("distill", *asked.SCORED["distill"], policy=policy)
    expected = asked.advantages(graph, logprobs=torch.tensor(asked.LOGPROBS))
    assert expected.any()
    torch.testing.assert_close(torch.tensor(found["distill"])[:2], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_skyrls_own_workers_and_servers_are_asked_and_its_environments_reward(found, policy, tmp_path):
    of = found["served"]
    (tmp_path / "mine.py").write_text("def reward(response):\n    return len(response.rstrip()) % 7 / 16 + 0.5\n")
    sampled = ["value.temperature=0", "value.max_tokens=12", "verifier.use=verifier.function"]
    settings = {"vineppo": [*sampled, f"verifier.function={tmp_path / 'mine.py'}:reward"], "recipe=toy_rredcot": []}
    for (graph, further), name in zip(settings.items(), ("vineppo", "rredcot"), strict=True):
        rows = {"answers": ["4", "4"], "temperature": 0.7 if name == "rredcot" else 1.0}
        expected = asked.advantages(CreditGraph(graph, *GRAPHS[graph], *further, policy=policy), **rows)
        assert len(set(expected.flatten().tolist())) > 3
        torch.testing.assert_close(torch.tensor(of[name])[:2], expected, atol=1e-5, rtol=1e-5)
    asked_as = [body for body in found["requests"] if body.get("min_tokens") == 1]  # as SkyRL's own requests
    assert {(b["top_k"], b["temperature"], b["include_stop_str_in_output"]) for b in asked_as} == {(-1, 0.0, True)}
    # The continuations that reached the limit have no reward now.
    assert not torch.tensor(of["zero"]).equal(torch.tensor(of["vineppo"]))
    assert "servers that share GPUs with the trainer sleep when advantages are" in of["asleep"]
    assert "servers give log-probs at temperature 1, but this trainer samples at 0.5" in of["colder"]
    assert "read the prompt's entry in a PromptDataset, but the trainer has a list" in of["another dataset"]
    assert "samples responses of one turn, but environment 'lengths' of SkyRL goes on" in of["goes on"]


@pytest.mark.slow
def test_advantages_of_a_batch_padded_on_the_left_equal_loops(found):
    padded = [mask + [0] * (WIDTH - len(mask)) for mask in MASKS]
    totals = [sum(rewards) for rewards in REWARDS]
    # Without states of one's own, the state of a turn is what was read since the turn before.
    read = [["start", " ".join(map(str, gap))] for gap in GAPS]
    expected = {
        "creditgraph:grpo": slow.grpo(padded, totals, UID),
        "creditgraph:gigpo": slow.gigpo(padded, REWARDS, UID, read, omega=1.0),
        "mine": slow.gigpo(padded, REWARDS, UID, read, omega=0.5),
    }
    for name, advantages in expected.items():
        got = torch.tensor(found[name])
        rows = right([row[:n] for row, n in zip(advantages, LENGTHS, strict=True)])
        torch.testing.assert_close(got[:4], rows, atol=1e-6, rtol=1e-6)
        assert not got[4].any(), "the row that fills the batch"
    rows = right([row[:n] for row, n in zip(slow.spread(padded, MT_GRPO), LENGTHS, strict=True)])
    torch.testing.assert_close(torch.tensor(found["creditgraph:mt_grpo"])[:4], rows, atol=1e-4, rtol=1e-4)
    assert found["asynchronous"] == found["creditgraph:gigpo"]
    # SkyRL's own divides by the unbiased deviation, and covers what the environment wrote too.
    own = torch.tensor(found["grpo"])[:4] * right(MASKS) * 2**0.5
    torch.testing.assert_close(own, torch.tensor(found["creditgraph:grpo"])[:4], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_critic_of_skyrl_is_read_at_the_tokens_of_its_values(found, batch):
    def left(rows):
        return torch.tensor([row + [0.0] * (WIDTH - len(row)) for row in rows])

    mask, values = left(MASKS), left(batch["values"])
    expected = CreditGraph("ppo")(Rollouts(mask=mask, rewards=left(batch["rewards"]), group=UID, values=values))
    advantages, returns = (torch.tensor(rows)[:4] for rows in found["ppo"])
    for i, n in enumerate(LENGTHS):
        torch.testing.assert_close(advantages[i, -n:], expected[i, :n])
        torch.testing.assert_close(returns[i, -n:], (expected + values * mask)[i, :n])
        assert not returns[i, :-n].any()


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["creditgraph:grpo", "creditgraph:gigpo", "creditgraph:mt_grpo", "creditgraph:ppo"])
def test_the_steps_of_a_trajectory_get_what_its_turns_have_in_one_row(found, graph):
    steps = found[f"steps {graph}"]
    whole = {"advantages": found[graph]} if graph != "creditgraph:ppo" else dict(zip(steps, found["ppo"], strict=False))
    width = len(steps["advantages"][0])
    for column, rows in whole.items():
        expected = []
        for row, mask, length in zip(rows, MASKS, LENGTHS, strict=False):
            begin = mask.index(0) + mask[mask.index(0) :].index(1)
            own = row[WIDTH - length :]
            expected += [[0.0] * (width - len(part)) + part for part in (own[:begin], own[begin:])]
        got = torch.tensor(steps[column])
        torch.testing.assert_close(got[:-1], torch.tensor(expected), atol=1e-6, rtol=1e-6)
        assert not got[-1].any(), "the row that fills the batch"
    assert steps["last"] == found["steps grpo"]["last"] == [False, True] * 4 + [True]
    assert steps["loss/avg_final_rewards"] == found["steps grpo"]["loss/avg_final_rewards"]


@pytest.mark.slow
def test_what_cannot_run_there_says_so_before_a_model_is_loaded(found):
    assert "expected one sampler of independent responses" in found["creditgraph:srpo"]
    assert "return a CreditTrainer of that module" in found["plain trainer"]
    assert found["check grpo"] is None
    assert found["check mt_grpo, p_trace"] is None
    assert found["check srpo"] == found["creditgraph:srpo"]
    assert "bounds advantages at -0.1, but SkyRL has divided them" in found["check loss of grpo_lambda"]
    assert "Set trainer.algorithm.policy_loss_type to rollout_is or dppo" in found["asynchronous loss"]
    assert "its loss needs entropies" in found["creditgraph:s_trace token_mean"]


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_the_clipped_objective_equals_skyrls_own(found, reduction):
    loss, gradient, metrics = found[f"creditgraph:grpo {reduction}"]
    theirs = found[f"regular {reduction}"]
    assert loss == pytest.approx(theirs[0], abs=1e-6)
    torch.testing.assert_close(torch.tensor(gradient), torch.tensor(theirs[1]), atol=1e-6, rtol=1e-6)
    assert "ratio_mean" in metrics
    assert found[f"creditgraph:p_trace {reduction}"][1] != gradient


@pytest.mark.slow
def test_a_worker_of_ray_gets_the_loss_from_the_registry(found):
    assert found["in a worker"] == "SkyRLLoss"


@pytest.mark.parametrize("graph", LOSSES)
def test_a_loss_does_not_see_where_padding_is_and_scales_with_its_advantages(graph):
    loss = Loss(graph)
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(4, WIDTH, generator=generator)
    logprobs = old + 0.4 * torch.randn(4, WIDTH, generator=generator)
    advantages = torch.randn(4, WIDTH, generator=generator)
    mask = torch.tensor([row + [0] * (WIDTH - len(row)) for row in MASKS])

    def step(scale=1.0, shifts=(0, 0, 0, 0)):
        def moved(x):
            return torch.stack([row.roll(by) for row, by in zip(x, shifts, strict=True)])

        leaf = logprobs.clone().requires_grad_()
        terms, _ = loss(moved(leaf), moved(old), scale * moved(advantages), moved(mask))
        terms.sum().backward()
        return terms.sum().detach(), leaf.grad

    padded_left = step(shifts=[WIDTH - n for n in LENGTHS])
    torch.testing.assert_close(padded_left, step(), atol=1e-6, rtol=1e-6)
    larger = tuple(x / 3 for x in step(scale=3.0))
    if graph != "grpo_lambda":
        torch.testing.assert_close(larger, step(), atol=1e-6, rtol=1e-5)
    else:  # it bounds them, so SkyRL's adapter refuses it
        assert (larger[1] - step()[1]).abs().max() > 0.01
