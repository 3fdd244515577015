"""Has verifiers write episodes as its evaluations and prime-rl do; runs in the environment .venv-verifiers.

    python dump_verifiers.py FOLDER

FOLDER/eval/traces.jsonl is of `write_episode`, with texts alone; traces.jsonl of FOLDER/rollouts/step_7/train/effective
has `Episode.to_record` with tokens, groups and advantages, which is what prime-rl's file monitor writes line by line.
"""

import json
import sys
from pathlib import Path

from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.episode import GroupInfo, TrainRunInfo, TrainWorkInfo, WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import AgentInfo, Reward, TraceTask, WireTrace
from verifiers.v1.types import AssistantMessage, ToolMessage, UserMessage
from verifiers.v1.utils.trace_store import write_episode


def nodes(reward, tokens):
    """A question, a turn of the model, what a tool said, and a last turn."""
    good = [0.5, 0.25] if reward else [-0.5, -0.25]

    def numbers(values):
        return {"logprobs": values, "trainer_logprobs": [v - 0.1 for v in values], "entropies": [1.0] * len(values)}

    return [
        MessageNode(
            message=UserMessage(content="3 + 4?"), **({"token_ids": [5, 6], "mask": [False] * 2} if tokens else {})
        ),
        MessageNode(
            parent=0,
            message=AssistantMessage(content="I add."),
            sampled=True,
            **(
                {"token_ids": [9, 10, 11], "mask": [False, True, True], "advantages": good, **numbers([-0.5, -0.75])}
                if tokens
                else {}
            ),
        ),
        MessageNode(
            parent=1,
            message=ToolMessage(tool_call_id="1", content="7"),
            **({"token_ids": [12, 13], "mask": [False] * 2} if tokens else {}),
        ),
        MessageNode(
            parent=2,
            message=AssistantMessage(content="It is 7."),
            sampled=True,
            **({"token_ids": [14], "mask": [True], "advantages": good[:1], **numbers([-0.25])} if tokens else {}),
        ),
    ]


def episode(number, reward, tokens):
    task = TraceTask(
        type="Sums", key=f"sum-{number // 2}", data=WireTaskData(idx=number // 2, prompt="3 + 4?", answer="7")
    )
    trace = WireTrace(
        task=task,
        agent=AgentInfo(config=WireAgentConfig()),
        nodes=nodes(reward, tokens),
        rewards={"right": Reward(score=reward, weight=2.0), "style": None},
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )
    made = WireEpisode(task=task, traces=[trace], ok=True)
    if tokens:
        made.group = GroupInfo(id=f"g{number // 2}")
        made.record_run(TrainRunInfo(id="run", work=TrainWorkInfo(step=7)))
    return made


def main():
    folder = Path(sys.argv[1])
    (folder / "eval").mkdir(parents=True)
    train = folder / "rollouts" / "step_7" / "train" / "effective"
    train.mkdir(parents=True)
    with (train / "traces.jsonl").open("w") as file:
        for number in range(4):
            reward = float(number % 2)
            write_episode(folder / "eval", episode(number, reward, tokens=False))
            file.write(json.dumps(episode(number, reward, tokens=True).to_record()) + "\n")
        file.write(json.dumps(WireEpisode(task=TraceTask(type="Sums", data=WireTaskData(idx=9))).to_record()) + "\n")


if __name__ == "__main__":
    main()
