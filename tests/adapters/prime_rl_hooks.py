"""Scores episodes of verifiers by credit graphs as prime-rl does; runs in the environment .venv-verifiers.

    python prime_rl_hooks.py RESULT.json

In PYTHONPATH are prime-rl's sources (src and packages/prime-rl-configs/src), or tests/adapters/prime_rl_stand_in.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import prime_rl.trainer.rl.loss as prime_loss
import torch
from prime_rl.orchestrator.algo import ALGORITHM_CLASSES, build_algorithm
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, Reward, TraceTask, WireTrace
from verifiers.v1.types import AssistantMessage, UserMessage

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.prime_rl import algorithm, loss
from creditgraph.adapters.rows import Rollouts
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.core.jagged import Jagged
from tests.adapters.prime_rl_episodes import CONTINUED, READ, REWARDS, TWO_AGENTS
from tests.adapters.tiny_server import tiny_server

REAL = hasattr(prime_loss, "compute_loss")


def trace(read, reward, ok=True, task=None, agent="agent"):
    """A question of two tokens, a turn of two, what was read, a turn of one and, without a gap, a turn of two."""

    def node(parent, sampled, token_ids, mask):
        message = AssistantMessage(content="a") if sampled else UserMessage(content="q")
        logprobs = [-0.5] * sum(mask)
        return MessageNode(
            parent=parent, message=message, sampled=sampled, token_ids=token_ids, mask=mask, logprobs=logprobs
        )

    return WireTrace(
        task=task,
        agent=AgentInfo(config=WireAgentConfig(), name=agent),
        nodes=[
            node(None, False, [5, 6], [False] * 2),
            node(0, True, [3, 10, 11], [False, True, True]),
            node(1, False, read, [False] * len(read)),
            node(2, True, [12], [True]),
            node(0, True, [13, 14], [True] * 2),
        ],
        rewards={"right": Reward(score=reward, weight=1.0)},
        is_completed=True,
        ok=ok,
    )


def episodes():
    """Four episodes of a group, and one that failed."""
    task = TraceTask(type="Sums", key="sum", data=WireTaskData(idx=0, prompt="q"))
    rows = [(read, reward, True) for read, reward in zip(READ, REWARDS, strict=True)] + [([7], 9.0, False)]
    return [WireEpisode(task=task, traces=[trace(*row, task)], ok=row[2]) for row in rows]


def scored(name, *overrides):
    """Advantages of each node of the traces; None where the algorithm left them."""
    if name != "grpo's own":
        ALGORITHM_CLASSES["grpo"] = algorithm(name, *overrides)
    config = SimpleNamespace(type="grpo", action_loss_type="rl", length_penalty=None)
    made = episodes()
    asyncio.run(build_algorithm(config, None).finalize_group(made))
    return [[node.advantages for node in episode.traces[0].nodes] for episode in made]


def of_two_agents(name):
    """The first advantage of each trace of three episodes, in each of which one proposes and two solve."""
    if name != "hierarchical_grpo's own":
        ALGORITHM_CLASSES["hierarchical_grpo"] = algorithm(name)
    config = SimpleNamespace(type="hierarchical_grpo", action_loss_type="rl", episode_agents=["solver"])
    task = TraceTask(type="Sums", key="sum", data=WireTaskData(idx=0, prompt="q"))
    made = [
        WireEpisode(
            task=task,
            traces=[
                trace([7], reward, task=task, agent=agent)
                for agent, reward in zip(("proposer", "solver", "solver"), rewards, strict=True)
            ],
            ok=True,
        )
        for rewards in TWO_AGENTS
    ]
    asyncio.run(build_algorithm(config, None).finalize_group(made))
    return [[one.nodes[1].advantages[0] for one in episode.traces] for episode in made]


def continued(*overrides):
    """Advantages of a graph that asks prime-rl's servers, those of the same rollouts by hand, and a refusal."""

    def answered(tokens, reward, task):
        message = {False: UserMessage(content="q"), True: AssistantMessage(content="a")}
        nodes = [
            MessageNode(
                parent=parent,
                message=message[sampled],
                sampled=sampled,
                token_ids=ids,
                mask=[sampled] * len(ids),
                logprobs=[-0.5] * len(ids) * sampled,
            )
            for parent, sampled, ids in ((None, False, [46, 3]), (0, True, tokens))
        ]
        rewards = {"right": Reward(score=reward, weight=1.0)}
        agent = AgentInfo(config=WireAgentConfig(), name="agent")
        return WireTrace(task=task, agent=agent, nodes=nodes, rewards=rewards, is_completed=True, ok=True)

    fixed = ("model=tiny", "verifier.use=verifier.exact", "value.temperature=0", "value.max_tokens=12", *overrides)
    ALGORITHM_CLASSES["grpo"] = algorithm("vineppo", *fixed)
    config = SimpleNamespace(type="grpo", action_loss_type="rl", length_penalty=None)
    task = TraceTask(type="Sums", key="sum", data=WireTaskData(idx=0, prompt="q", answer=4))
    made = [WireEpisode(task=task, traces=[answered(*row, task)], ok=True) for row in CONTINUED]
    with tiny_server() as server:
        client = SimpleNamespace(base_url=f"{server.url}/v1", api_key_var="NO_KEY")
        pool = SimpleNamespace(train_client=client, model_name="before")
        scorer = build_algorithm(config, pool)
        pool.model_name = "tiny"
        asyncio.run(scorer.finalize_group(made))
        try:
            asyncio.run(scorer.finalize_group(episodes()))
        except DataError as error:
            sentence = str(error)
        by_hand = CreditGraph("vineppo", *fixed, f"--endpoint={server.url}/v1", "--model=tiny")
        rows = Jagged.from_rows([row for row, _ in CONTINUED], torch.int64)
        mask = rows.with_values(torch.ones_like(rows.values)).to_padded()
        rewards = torch.tensor([reward for _, reward in CONTINUED])
        given = {"prompts": [[46, 3]] * len(CONTINUED), "answers": ["4"] * len(CONTINUED), "tokens": rows.to_padded()}
        expected = by_hand(Rollouts(mask=mask, rewards=rewards, group=[0] * len(CONTINUED), **given))
    found = [episode.traces[0].nodes[1].advantages for episode in made]
    return {"found": found, "expected": expected.tolist(), "refused": sentence, "asked": len(server.requests)}


def refused():
    """What a setting of prime-rl's own algorithm gets."""
    config = SimpleNamespace(type="grpo", action_loss_type="rl", length_penalty=SimpleNamespace())
    try:
        build_algorithm(config, None)
    except ConfigError as error:
        return str(error)


def losses(batch):
    """prime-rl's loss of a batch of samples: by sample, in one call of its own function where its sources are there."""
    logprobs = torch.tensor(batch["logprobs"], requires_grad=True)
    rows = [torch.tensor(batch[name]) for name in ("old", "advantages", "mask")]
    if not REAL:
        total = sum(
            loss(prime_loss.LossInputs(p, old, None, advantage, mask), graph="grpo").loss
            for p, old, advantage, mask in zip(logprobs, *rows, strict=True)
        )
        total = total / int(rows[2].sum())
    else:
        from prime_rl.configs.trainer import CustomLossConfig

        config = CustomLossConfig(import_path="creditgraph.adapters.prime_rl.loss", kwargs={"graph": "grpo"})
        none = (None, None, None)
        total, _ = prime_loss.compute_loss(
            list(logprobs),
            list(rows[0]),
            None,
            list(rows[1]),
            list(rows[2]),
            *none,
            prime_loss.setup_rl_loss_fn(config),
            int(rows[2].sum()),
            1,
            1,
        )
    total.backward()
    return [total.item(), logprobs.grad.tolist()]


def main():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 5, generator=generator)
    batch = {
        "old": old.tolist(),
        "logprobs": (old + 0.3 * torch.randn(3, 5, generator=generator)).tolist(),
        "advantages": torch.randn(3, 5, generator=generator).tolist(),
        "mask": [[True, True, False, True, True], [True, True, True, False, False], [False, True, True, True, True]],
    }
    out = {"real": REAL, "batch": batch, "loss": losses(batch)}
    if REAL:
        out["grpo's own"] = scored("grpo's own")
        out["hierarchical_grpo's own"] = of_two_agents("hierarchical_grpo's own")
    for name in ("drgrpo", "gigpo"):
        out[name] = scored(name)
    out["two agents"] = of_two_agents("drgrpo")
    out["refused"] = refused()
    out["continued"] = continued("segmenter.use=segmenter.fixed", "segmenter.tokens=2", "value.continuations=1")
    Path(sys.argv[1]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
