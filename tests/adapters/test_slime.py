"""Credit graphs by slime's hooks: its reward hook, its advantage hook and its loss hook."""

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from creditgraph.pipeline import ROOT
from tests.adapters import slow
from tests.adapters.prime_rl_episodes import CONTINUED

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
VOCABULARY = 12
RESPONSES = [[5, 6, 7, 7, 5, 6], [5, 6, 5, 8, 6], [5, 7, 6, 5, 6], [5, 6, 9, 5], [3, 4, 5]]
MASKS = [[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 1], [1, 0, 1, 1, 1], [1, 1, 0, 1], None]
REMOVED = 3
TRAINED = [[1] * 3 if m is None else [0] * 4 if i == REMOVED else m for i, m in enumerate(MASKS)]
REWARDS = [1.0, 0.25, 0.0, 0.5, 0.75]
GROUPS = [7, 7, 3, 3, 3]


@pytest.fixture(scope="module")
def given():
    generator = torch.Generator().manual_seed(0)
    total = sum(len(r) + 2 for r in RESPONSES)
    return {
        "responses": RESPONSES,
        "masks": MASKS,
        "trained": TRAINED,
        "removed": REMOVED,
        "rewards": REWARDS,
        "groups": GROUPS,
        "continued": CONTINUED,
        "logits": torch.randn(total, VOCABULARY, generator=generator).tolist(),
        "old": [(-2.5 + 0.6 * torch.randn(len(r), generator=generator)).tolist() for r in RESPONSES],
    }


@pytest.fixture(scope="module")
def found(given, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slime")
    (folder / "given.json").write_text(json.dumps(given))
    # slime's own sources come before the stand-ins.
    paths = [str(ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")]), str(HERE / "slime_stand_in")]
    command = [sys.executable, HERE / "slime_hooks.py", folder / "given.json", folder / "out.json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


def padded(rows):
    width = max(map(len, rows))
    return [row + [0] * (width - len(row)) for row in rows]


def test_a_rank_gets_the_advantages_of_its_tokens(found):
    # A removed sample is compared, and not trained on.
    expected = slow.grpo(padded(TRAINED), REWARDS, GROUPS)
    assert found["grpo"]["raw"] == REWARDS
    assert found["grpo"]["rows"] == found["grpo"]["advantages"]
    for row, advantages in zip(found["grpo"]["rows"], expected, strict=True):
        assert row == pytest.approx(advantages[: len(row)], abs=1e-6)


def test_a_graph_continues_responses_at_slimes_router_and_has_slimes_rewards(found):
    first, again, by_hand = found["continued"]["rows"]
    assert any(map(any, first))
    for rows in (first, again, found["own verifier"][0]):
        for row, (tokens, _), expected in zip(rows, CONTINUED, by_hand, strict=True):
            assert row == pytest.approx(expected[: len(tokens)], abs=1e-6)
    assert (found["continued"]["stop"], found["continued"]["top_p"]) == (None, 0.5)
    assert "'vineppo': with group_rm a reward is that of a whole group, and what the graph samples" in found["group_rm"]


def test_turns_are_runs_of_the_loss_mask(found):
    assert not any(found["gigpo"]["rows"][REMOVED])
    kept = [i for i in range(len(RESPONSES)) if i != REMOVED]  # a response without turns is no episode
    mask = padded([TRAINED[i] for i in kept])
    runs = slow.turns(mask)
    rewards = [[0.0] * (len(turns) - 1) + [REWARDS[i]] for i, turns in zip(kept, runs, strict=True)]
    states = []
    for i, turns in zip(kept, runs, strict=True):
        read = [RESPONSES[i][end:begin] for (_, end), (begin, _) in pairwise(turns)]
        states.append(["start", *(" ".join(map(str, tokens)) for tokens in read)])
    rows = slow.gigpo(mask, rewards, [GROUPS[i] for i in kept], states, omega=0.5)
    for i, expected in zip(kept, rows, strict=True):
        assert found["gigpo"]["rows"][i] == pytest.approx(expected[: len(RESPONSES[i])], abs=1e-6)


def test_samples_of_a_rollout_with_one_reward_are_its_steps(found):
    for graph in ("grpo", "gigpo"):
        whole = found[graph]["rows"]
        rows = iter(found[f"{graph} siblings"]["rows"])
        for row, mask in zip(whole, MASKS, strict=True):
            parts = [next(rows) for _ in range(1 if mask is None else 2)]
            assert [x for part in parts for x in part] == pytest.approx(row, abs=1e-6)
    own = found["grpo of their own"]
    masks = [[float(x != 0) for x in row] for row in own["rows"]]
    groups = [g for g, mask in zip(GROUPS, MASKS, strict=True) for _ in range(1 if mask is None else 2)]
    expected = slow.grpo(padded(masks), own["raw"], groups)
    for row, advantages in zip(own["rows"], expected, strict=True):
        assert row == pytest.approx(advantages[: len(row)], abs=1e-6)


def test_the_loss_equals_a_loop_and_slimes_own(found, given):
    total, at = 0.0, 0
    logits = torch.tensor(given["logits"])
    for i, response in enumerate(RESPONSES):
        logprobs = logits[at : at + len(response) + 2].log_softmax(-1)
        at += len(response) + 2
        for t, token in enumerate(response):
            if TRAINED[i][t]:
                advantage = found["grpo"]["rows"][i][t]
                ratio = math.exp(float(logprobs[t + 1, token]) - given["old"][i][t])
                term = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
                total -= term / sum(TRAINED[i])
    loss, gradient, logged = found["grpo"]["ours"]
    assert loss == pytest.approx(total, abs=1e-5)
    assert torch.tensor(gradient).abs().max() > 0.01
    assert 0 < logged["ratio_mean"] / 4 < 3, "of four trained samples"
    if found["real"]:
        assert loss == pytest.approx(found["grpo"]["theirs"][0], abs=1e-6)
        torch.testing.assert_close(
            torch.tensor(gradient), torch.tensor(found["grpo"]["theirs"][1]), atol=1e-6, rtol=1e-6
        )


def test_errors_name_the_setting(found):
    assert "put `creditgraph: grpo` or another graph into the file of --custom-config-path" in found["no graph"]
    assert "custom_reward_post_process_path: creditgraph.adapters.slime.credit" in found["no credit"]
    assert "the loss of a graph has no part for use_kl_loss, context_parallel_size;" in found["kl"]
    assert "a sample has no group_index" in found["no group"]
    assert "differs within responses, but with advantage_estimator=gspo" in found["gspo"]
    assert any(map(any, found["gspo, our loss"]))
