"""A credit graph in the place of NeMo-RL's estimator; chosen by NeMo-RL's own function where its sources are there."""

from types import SimpleNamespace

import pytest
import torch

from creditgraph.adapters.nemo_rl import Estimator
from creditgraph.pipeline.core.errors import ConfigError
from tests.adapters import slow

PROMPTS = [[1, 2, 0], [1, 2, 3], [1, 2, 0], [1, 2, 3]]
# Of each row, what follows the prompt: (sampled, token ids).
MESSAGES = [
    [(True, [5, 6]), (False, [7, 7]), (True, [5])],
    [(True, [5]), (False, [8]), (True, [6, 6])],
    [(True, [5, 6, 5]), (False, [7, 7]), (True, [5])],
    [(True, [6])],
]
REWARDS = [1.0, 0.25, 0.0, 0.5]


def estimator(graph, *overrides):
    """By NeMo-RL's own choice where its sources are there."""
    config = {"name": "grpo", "graph": graph, "overrides": list(overrides)}
    try:
        import nemo_rl.algorithms.grpo as theirs
    except ImportError:
        return Estimator(SimpleNamespace(**config))
    theirs.GRPOAdvantageEstimator = Estimator
    settings = SimpleNamespace(adv_estimator=theirs.AdvEstimatorConfig(**config))
    found = theirs._create_advantage_estimator(SimpleNamespace(grpo=settings, loss_fn=None))
    assert isinstance(found, Estimator)
    return found


@pytest.fixture
def batch():
    log, mask = [], []
    for prompt, messages in zip(PROMPTS, MESSAGES, strict=True):
        ids = [token for token in prompt if token]
        log.append([{"token_ids": torch.tensor(ids)}] + [{"token_ids": torch.tensor(ids)} for _, ids in messages])
        mask.append([0] * len(ids) + [int(sampled) for sampled, ids in messages for _ in ids])
    width = max(map(len, mask))
    return {
        "prompt_ids": torch.tensor(PROMPTS),
        "rewards": torch.tensor(REWARDS),
        "mask": torch.tensor([row + [0] * (width - len(row)) for row in mask]),
        "repeated_batch": {"message_log": log},
        "logprobs_policy": None,
        "logprobs_reference": None,
    }


def test_advantages_of_responses_and_of_turns_equal_loops(batch):
    mask, groups = batch["mask"].tolist(), [tuple(prompt) for prompt in PROMPTS]
    got = estimator("grpo").compute_advantage(**batch)
    torch.testing.assert_close(got, torch.tensor(slow.grpo(mask, REWARDS, groups)), atol=1e-6, rtol=1e-6)
    states = [["start", *(" ".join(map(str, ids)) for sampled, ids in row if not sampled)] for row in MESSAGES]
    rewards = [[0.0] * (len(row) - 1) + [reward] for row, reward in zip(states, REWARDS, strict=True)]
    got = estimator("gigpo", "advantage.omega=0.5").compute_advantage(**batch)
    expected = slow.gigpo(mask, rewards, groups, states, omega=0.5)
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def test_without_messages_only_the_state_of_the_first_turn_is_known(batch):
    mask, groups = batch["mask"].tolist(), [tuple(prompt) for prompt in PROMPTS]
    runs = slow.turns(mask)
    rewards = [[0.0] * (len(turns) - 1) + [reward] for turns, reward in zip(runs, REWARDS, strict=True)]
    states = [["start", *(f"{i}.{k}" for k in range(1, len(turns)))] for i, turns in enumerate(runs)]
    got = estimator("gigpo").compute_advantage(**batch | {"repeated_batch": {}})
    expected = torch.tensor(slow.gigpo(mask, rewards, groups, states, omega=1.0))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_a_graph_that_reads_values_is_refused_when_it_is_chosen():
    with pytest.raises(ConfigError, match="graph 'ppo': it reads values, but the trainer gives none"):
        estimator("ppo")


def test_ratios_of_sequences_take_graphs_of_whole_responses_alone(batch):
    config, loss = {"name": "grpo", "overrides": []}, SimpleNamespace(sequence_level_importance_ratios=True)
    assert Estimator(SimpleNamespace(**config, graph="grpo"), loss).compute_advantage(**batch).any()
    turns = Estimator(SimpleNamespace(**config, graph="gigpo"), loss)
    with pytest.raises(ConfigError, match="but with sequence_level_importance_ratios=true the trainer's loss"):
        turns.compute_advantage(**batch)


def test_without_a_graph_it_says_what_to_set():
    with pytest.raises(ConfigError, match=r"set grpo\.adv_estimator\.graph"):
        Estimator(SimpleNamespace(name="grpo"))
