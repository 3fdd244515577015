"""Runs the cookbook's own steps to its data and to gradients with credit graphs; in the environment .venv-tinker.

python tinker_hooks.py RESULT.json
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from tinker import Datum, EncodedTextChunk, ModelInput, TensorData, TrainingClient
from tinker.types import ForwardBackwardOutput, ImageChunk, OptimStepResponse
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import EnvGroupBuilder, Trajectory, TrajectoryGroup, Transition

from creditgraph.adapters.tinker import FORWARD_BACKWARD, REMOVE_MASK, register
from creditgraph.pipeline.core.errors import ConfigError
from tests.adapters.tinker_episodes import GROUPS

# What the cookbook prints of two groups; it shows an image as a token.
TOKENIZER = SimpleNamespace(encode=lambda text, **_: [64], decode=str)


def read(pieces):
    """Runs of token ids, and "red" or "blue", an image."""
    chunks = []
    for piece in pieces:
        image = isinstance(piece, str)
        chunk = ImageChunk(data=piece.encode(), format="png", expected_tokens=2) if image else None
        chunks.append(chunk or EncodedTextChunk(tokens=piece))
    return ModelInput(chunks=chunks)


def trajectory(steps):
    transitions = [
        Transition(
            ob=read(step["read"]),
            ac=TokensWithLogprobs(tokens=step["tokens"], maybe_logprobs=[-0.5] * len(step["tokens"])),
            reward=step["reward"],
            episode_done=step is steps[-1],
            metrics={"parse_error_masked": 1.0} if step.get("masked") else {},
        )
        for step in steps
    ]
    return Trajectory(transitions=transitions, final_ob=ModelInput(chunks=[]))


class Builder(EnvGroupBuilder):
    async def make_envs(self):
        return []


def groups():
    made = []
    for members in GROUPS:
        final = [member["final"] for member in members]
        trajectories = [trajectory(member["steps"]) for member in members]
        made.append(TrajectoryGroup(trajectories_G=trajectories, final_rewards_G=final, metrics_G=[{}] * len(members)))
    return made


def prepared():
    """What the cookbook would train on, and its metrics."""
    data, metrics, *_ = asyncio.run(train.prepare_minibatch([Builder()] * len(GROUPS), groups(), TOKENIZER, None, 0, 0))
    rows = [{name: d.loss_fn_inputs[name].tolist() for name in ("target_tokens", "advantages", "mask")} for d in data]
    return {"data": rows, "credit": {name: x for name, x in metrics.items() if name.startswith("credit/")}}


class Done:
    """A future of Tinker's that has its result."""

    def __init__(self, result):
        self.result = result

    def __await__(self):
        return self.result
        yield


class Client(TrainingClient):
    """Tinker's client without a server: log-probs are given, and gradients are those that it would send."""

    def __init__(self, logprobs):
        self.logprobs, self.sent = logprobs, []

    def forward_backward_custom(self, data, loss_fn):
        outputs = [{"logprobs": TensorData.from_torch(torch.tensor(row))} for row in self.logprobs]
        forward = ForwardBackwardOutput(loss_fn_output_type="scalar", loss_fn_outputs=outputs, metrics={})
        self._get_custom_loss_forward_data(data, "cross_entropy")
        custom = self._compute_custom_loss(data, loss_fn, forward)
        self.sent = [(-datum.loss_fn_inputs["weights"].to_torch()).tolist() for datum in custom.data]
        self.loss = custom.loss_sum
        return Done(forward)

    def optim_step(self, optim_params):
        return Done(OptimStepResponse(metrics={}))


def gradients(batch):
    data = [
        Datum(
            model_input=ModelInput.from_ints([3] * len(row)),
            loss_fn_inputs={
                "target_tokens": TensorData.from_torch(torch.full((len(row),), 4)),
                **{name: TensorData.from_torch(torch.tensor(batch[name][i])) for name in ("advantages", "mask")},
                "logprobs": TensorData.from_torch(torch.tensor(batch["old"][i])),
            },
        )
        for i, row in enumerate(batch["old"])
    ]
    client = Client(batch["logprobs"])
    asyncio.run(train.train_step(data, client, 1e-3, 1, "importance_sampling"))
    return {"loss": client.loss, "gradients": client.sent}


def cookbook_functions():
    """Whether a loss is that of `loss_fn`: the cookbook removes masks, and Tinker's request is its own."""
    return [train._remove_mask is REMOVE_MASK, TrainingClient.forward_backward is FORWARD_BACKWARD]


def main():
    out = {"own": prepared()}
    file = Path(sys.argv[1]).with_name("credit.jsonl")
    for name in ("drgrpo", "gigpo"):
        register(name, *([f"--record={file}"] if name == "gigpo" else []))
        out[name] = prepared()
    out["recorded"] = [json.loads(line) for line in file.read_text().splitlines()]
    generator = torch.Generator().manual_seed(0)

    def rows(scale):
        return [(scale * torch.randn(n, generator=generator)).tolist() for n in (4, 6)]

    old = rows(1.0)
    moved = [[0.3 * x for x in row] for row in rows(1.0)]
    logprobs = [[a + b for a, b in zip(*both, strict=True)] for both in zip(old, moved, strict=True)]
    batch = {"old": old, "logprobs": logprobs}
    batch |= {"advantages": rows(1.0), "mask": [[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0, 1.0, 1.0]]}
    register("grpo", objective=True)
    out["batch"], out["loss"] = batch, gradients(batch)
    out["own functions"] = [cookbook_functions()]
    for name in ("entropy_8020", "ppo", "srpo"):
        try:
            register(name, objective=True)
        except ConfigError as error:
            out[name] = str(error)
    register("grpo")
    out["own functions"].append(cookbook_functions())
    Path(sys.argv[1]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
