"""A graph of toy components without models, and a program that runs it and can kill itself at a chosen instant.

    python toy_graph.py

It reads one JSON list a line, [run directory, iterations, delay, overlap, sleep, kill], forks (torch is imported once),
answers with the child's process id and then its exit code; the child's messages go to RUN_DIR.err. KILL is null,
"write:N" (N-th file of tensors half written), "rename:N" (just before the N-th rename) or "done:N" (just after it).
"""

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.graph import Graph, Node, Wire
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Rewards, TrainReport, Weights


@dataclass(frozen=True, kw_only=True)
class BatchOut:
    batch: Prompts


@dataclass(frozen=True, kw_only=True)
class RewardsOut:
    rewards: Rewards


@dataclass(frozen=True, kw_only=True)
class LearnOut:
    report: TrainReport
    weights: Weights


@dataclass(frozen=True, kw_only=True)
class ReportOut:
    report: TrainReport


class Source(Component):
    """Counts its runs, so that a repeated or lost iteration shows."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        sleep: float = 0.0
        reject_every: int = 3

    def setup(self, context):
        super().setup(context)
        self.position = 0
        context.log(rows=4)
        context.reject({"row": -1}, "empty")

    def run(self) -> BatchOut:
        time.sleep(self.config.sleep)
        uid = self.context.uids(4)
        self.position += 1
        self.context.log(position=self.position)
        if self.context.iteration % self.config.reject_every == 0:
            self.context.reject({"row": self.position}, "no answer")
        tokens = Jagged.from_rows([[self.position] * i for i in range(4)], torch.int32)
        return BatchOut(
            batch=Prompts(
                uid=uid, tokens=tokens, text=["é"] * 4, answer=[""] * 4, metadata=[{"n": i} for i in range(4)]
            )
        )

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Score(Component):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        sleep: float = 0.0
        fail_at: int = -1

    def run(self, *, batch: Prompts, weights: Weights) -> RewardsOut:
        time.sleep(self.config.sleep)
        if self.context.iteration == self.config.fail_at:
            raise KeyError("lost")
        noise = self.context.rng().uniform(batch.uid)
        value = (noise * weights.tensors["w"].double().sum() + batch.tokens.sum()).float()
        self.context.log(mean=float(value.mean()), version=weights.version)
        return RewardsOut(
            rewards=Rewards(uid=batch.uid, value=value, correct=value > 0, valid=value == value, detail=[""] * 4)
        )


class Learn(Component):
    placement = "collective"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        sleep: float = 0.0
        fail_at: int = -1

    def setup(self, context):
        super().setup(context)
        self.weights = torch.arange(1.0, 4.0)
        self.optimizer = {"state": {0: {"momentum": torch.zeros(3)}}, "betas": (0.9, 0.99)}
        self.version = 0

    def publish(self):
        return Weights(
            version=self.version, tensors={"w": self.weights.clone(), "tied": self.weights.to(torch.bfloat16)}
        )

    def initial(self):
        return {"weights": self.publish()}

    def run(self, *, batch: Prompts, rewards: Rewards) -> LearnOut:
        time.sleep(self.config.sleep)
        if self.context.iteration == self.config.fail_at:
            raise ValueError("diverged")
        momentum = self.optimizer["state"][0]["momentum"]
        momentum.mul_(self.optimizer["betas"][0]).add_(torch.sin(rewards.value.mean() + torch.arange(3)))
        self.weights.add_(momentum)
        self.version += 1
        self.context.log(norm=float(self.weights.norm()))
        return LearnOut(report=TrainReport(metrics={"loss": 1.5}, seconds={"step": 0.0}), weights=self.publish())

    def state_dict(self):
        return {"weights": self.weights, "optimizer": self.optimizer, "version": self.version}

    def load_state_dict(self, state):
        self.weights, self.optimizer, self.version = state["weights"], state["optimizer"], state["version"]


class ShardedLearn(Learn):
    """Its weights are in a shard, as those of `learner.megatron` are."""

    def state_dict(self):
        return {"version": self.version}

    def load_state_dict(self, state):
        self.version = state["version"]

    def save_shards(self, folder):
        torch.save({"weights": self.weights, "optimizer": self.optimizer}, folder / "rank0.pt")

    def load_shards(self, folder):
        state = torch.load(folder / "rank0.pt")
        self.weights = state["weights"]
        self.optimizer = state["optimizer"]


class Evaluate(Component):
    """Reads rewards of the iteration; in the final pass too."""

    final_pass = True

    def run(self, *, weights: Weights) -> ReportOut:
        self.context.log(accuracy=float(weights.tensors["w"].sum()), version=weights.version)
        return ReportOut(report=TrainReport(metrics={}, seconds={}))


def node(name, cls, wires=None, **config):
    parsed = {}
    for socket, text in (wires or {}).items():
        source, _, delay = text.partition("@")
        parsed[socket] = [Wire(*source.split("."), int(delay.removeprefix("<=") or 0), delay.startswith("<="))]
    return Node(name, f"toy:{cls.__name__}", cls, cls.Config(**config), parsed, config)


def make_graph(delay=1, sleep=0.0, score_fails=-1, learn_fails=-1):
    return Graph(
        (
            node("source", Source, sleep=sleep),
            node("evaluator", Evaluate, {"weights": f"learner.weights@{delay}"}),
            node(
                "score",
                Score,
                {"batch": "source.batch", "weights": f"learner.weights@{delay}"},
                sleep=sleep,
                fail_at=score_fails,
            ),
            node(
                "learner",
                Learn,
                {"batch": "source.batch", "rewards": "score.rewards"},
                sleep=sleep,
                fail_at=learn_fails,
            ),
        )
    )


def train(path, iterations, delay=1, overlap=True, sleep=0.0, every=3, segment=100, **settings):
    from unittest.mock import patch

    from creditgraph.pipeline.run import packing
    from creditgraph.pipeline.run.checkpoint import CheckpointSettings
    from creditgraph.pipeline.run.executor import Executor, RunSettings
    from creditgraph.pipeline.run.run_directory import RunDirectory

    run_settings = RunSettings(
        iterations=iterations, overlap=overlap, checkpoint=CheckpointSettings(every=every), **settings
    )
    with (
        patch.object(packing, "SEGMENT", segment),  # other tests of this process have their own
        RunDirectory.open(path, {"nodes": {"delay": delay}}) as run,
        Executor(make_graph(delay, sleep), run_settings, run=run) as executor,
    ):
        executor.setup()
        executor.restore()
        return executor.run()


def kill_at(what, count):
    """Arms a SIGKILL of this process inside the checkpoint code."""
    import creditgraph.pipeline.run.checkpoint as checkpoint

    seen = {"write": 0, "rename": 0}
    save_file, replace = checkpoint.save_file, os.replace

    def half_written(tensors, path):
        seen["write"] += 1
        if what == "write" and seen["write"] == count:
            save_file(tensors, path)
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        save_file(tensors, path)

    def renamed(source, target):
        if "checkpoints" in str(target):
            seen["rename"] += 1
        if what == "rename" and seen["rename"] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
        if what == "done" and seen["rename"] == count:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_file = half_written
    checkpoint.os.replace = renamed


def child(directory, iterations, delay, overlap, sleep, kill, segment=100):
    errors = os.open(f"{directory}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)
    try:
        if kill:
            kill_at(kill.split(":")[0], int(kill.split(":")[1]))
        code = train(Path(directory), iterations, delay, overlap, sleep, segment=segment).exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def tell(value):
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    tell("ready")
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            child(*json.loads(line))
        tell(pid)
        tell(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
