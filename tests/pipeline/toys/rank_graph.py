"""A graph of toy components for several ranks, and a program that runs it: torch is imported once, ranks are forked.

    python rank_graph.py

It reads one JSON object a line, {world, path, port, …options of `Options`}, forks that many ranks with the variables
torchrun sets, and answers with the list of their exit codes. The messages of rank r go to PATH.r. A fault is [node,
rank, iteration, what], what being "raise", "kill" (SIGKILL), "stop" (SIGUSR1), "freeze" (SIGSTOP), "sleep" (`sleep`
seconds) or "diverge". A frozen rank is killed when the others have ended.
"""

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

from creditgraph.pipeline.core.component import Component, Count, ModelSpec
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.graph import Graph, Node, Wire
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Prompts, Rewards, TrainReport, Weights, check_aligned

BATCH = 6


@dataclass(kw_only=True)
class Options:
    world: int
    path: str
    port: int
    size: int = 1
    iterations: int = 5
    delay: int = 1
    late: bool = False
    every: int = 2
    dead: float = 45.0
    patience: float = 600.0
    sleep: float = 600.0
    fault: list = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Batches:
    batch: Prompts


@dataclass(frozen=True, kw_only=True)
class Scores:
    rewards: Rewards
    credit: Credit


@dataclass(frozen=True, kw_only=True)
class Learned:
    report: TrainReport
    weights: Weights


@dataclass(frozen=True, kw_only=True)
class Report:
    report: TrainReport


class Faulty(Component):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        fault: tuple = ()
        size: int = 1
        sleep: float = 0.0

    def fail(self):
        if self.config.fault[:3] != (self.context.node, self.context.ranks.rank, self.context.iteration):
            return
        what = self.config.fault[3]
        if what == "raise":
            raise DataError(f"no rows left on {self.context.node}")
        if what == "sleep":
            time.sleep(self.config.sleep)
            return
        if what == "diverge":
            raise FloatingPointError("diverged")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGUSR1, "freeze": signal.SIGSTOP}[what])


class Source(Faulty):
    def setup(self, context):
        super().setup(context)
        self.position = 0

    def run(self) -> Batches:
        self.fail()
        mine = self.context.ranks.share(BATCH)
        uid, numbers = self.context.common_uids(BATCH)[mine], list(range(self.position, self.position + BATCH))[mine]
        self.position += BATCH
        self.context.log(position=self.position)
        self.context.reject({"row": numbers[0]}, "odd")
        tokens = Jagged.from_rows([[n] * (1 + n % 4) for n in numbers], torch.int32)
        metadata = [{"n": n} for n in numbers]
        return Batches(
            batch=Prompts(uid=uid, tokens=tokens, text=["é"] * len(uid), answer=[""] * len(uid), metadata=metadata)
        )

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Score(Faulty):
    def run(self, *, batch: Prompts, weights: Weights) -> Scores:
        assert self.context.ranks.leader
        self.fail()
        value = (
            self.context.rng().uniform(batch.uid) * float(weights.tensors["w"].double().sum()) + batch.tokens.sum()
        ).float()
        self.context.log(mean=float(value.mean()), rows=Count(len(value)), version=weights.version)
        rewards = Rewards(
            uid=batch.uid, value=value, correct=value > 0, valid=value == value, detail=["ü"] * len(value)
        )
        tokens = batch.tokens
        credit = Credit(uid=batch.uid, advantage=tokens.spread(value), mask=tokens.with_values(tokens.values >= 0))
        return Scores(rewards=rewards, credit=credit)


class Learn(Faulty):
    placement = "collective"

    @classmethod
    def ranks_per_replica(cls, config):
        return config.size

    def setup(self, context):
        super().setup(context)
        self.weights, self.version = torch.arange(1.0, 5.0, dtype=torch.float64), 0

    def publish(self):
        ranks = self.context.ranks
        return Weights(version=self.version, tensors={"w": self.weights.clone()} if ranks.leader else None)

    def initial(self):
        return {"weights": self.publish()}

    def run(self, *, batch: Prompts, rewards: list[Rewards], credit: Credit) -> Learned:
        self.fail()
        check_aligned(batch, rewards[0])
        check_aligned(batch, credit)
        assert rewards[0].origin == "score.rewards"
        # Every rank has the rows of its replica, and sums.
        own = torch.stack([rewards[0].value.double().sum(), torch.tensor(len(batch)).double()])
        pushed, rows = self.context.all_sum(own)
        self.weights += 0.01 * torch.sin(pushed / rows.clamp(min=1) + torch.arange(4))
        self.version += 1
        self.context.log(norm=float(self.weights.norm()), rows=Count(rows))
        return Learned(report=TrainReport(metrics={"loss": 1.5}, seconds={}), weights=self.publish())

    def state_dict(self):
        return {"version": self.version}

    def load_state_dict(self, state):
        self.version = state["version"]

    def save_shards(self, folder):
        ranks = self.context.ranks
        if ranks.replica == 0:
            part = self.weights.chunk(ranks.per_replica)[ranks.position]
            (folder / f"{ranks.position}.json").write_text(json.dumps(part.tolist()))

    def load_shards(self, folder):
        parts = [json.loads(p.read_text()) for p in sorted(folder.iterdir())]
        self.weights = torch.tensor([x for part in parts for x in part], dtype=torch.float64)


class Evaluate(Component):
    final_pass = True

    def run(self, *, weights: Weights) -> Report:
        replicas = self.context.all_sum(torch.ones(1))
        self.context.log(accuracy=float(weights.tensors["w"].sum()), replicas=float(replicas))
        return Report(report=TrainReport(metrics={}, seconds={}))


def node(name, cls, wires=None, **config):
    parsed = {}
    for socket, texts in (wires or {}).items():
        pairs = [text.partition("@") for text in ([texts] if isinstance(texts, str) else texts)]
        parsed[socket] = [Wire(*source.split("."), int(delay or 0)) for source, _, delay in pairs]
    return Node(name, f"toy:{cls.__name__}", cls, cls.Config(**config), parsed, config)


class LateSource(Source):
    def initial(self):
        uid = torch.zeros(0, dtype=torch.int64)
        return {"batch": Prompts(uid=uid, tokens=Jagged.from_rows([], torch.int32), text=[], answer=[], metadata=[])}


class LateScore(Score):
    def initial(self):
        none, empty = torch.zeros(0), Jagged.from_rows([], torch.float32)
        uid = torch.zeros(0, dtype=torch.int64)
        rewards = Rewards(uid=uid, value=none, correct=none > 0, valid=none > 0, detail=[])
        return {"rewards": rewards, "credit": Credit(uid=uid, advantage=empty, mask=empty.to(torch.bool))}


def make_graph(options):
    more = {"fault": tuple(options.fault), "size": options.size, "sleep": options.sleep}
    weights = f"learner.weights@{options.delay}"
    late = "@1" if options.late else ""
    wires = {"batch": f"source.batch{late}", "rewards": [f"score.rewards{late}"], "credit": f"score.credit{late}"}
    return Graph(
        (
            node("source", LateSource if options.late else Source, **more),
            node("evaluator", Evaluate, {"weights": weights}),
            node("score", LateScore if options.late else Score, {"batch": "source.batch", "weights": weights}, **more),
            node("learner", Learn, wires, **more),
        )
    )


def work(options):
    from creditgraph.pipeline.app.commands.train import train
    from creditgraph.pipeline.core.errors import CreditgraphError
    from creditgraph.pipeline.run.checkpoint import CheckpointSettings
    from creditgraph.pipeline.run.compose.experiment import Experiment
    from creditgraph.pipeline.run.distributed import watchdog
    from creditgraph.pipeline.run.distributed.processes import run_together
    from creditgraph.pipeline.run.distributed.team import plan_ranks, rendezvous
    from creditgraph.pipeline.run.metrics import WandbSettings
    from creditgraph.pipeline.run.run_settings import RunSettings

    watchdog.DEAD, watchdog.PATIENCE = options.dead, options.patience
    graph, path = make_graph(options), Path(options.path)
    run = RunSettings(
        name=path.name,
        root=str(path.parent),
        device="cpu",
        iterations=options.iterations,
        checkpoint=CheckpointSettings(every=options.every),
        wandb=WandbSettings(mode="disabled"),
    )
    experiment = Experiment(run=run, model=ModelSpec(), data={}, graph=graph, resolved={"run": {"seed": 0}})
    try:
        meeting = rendezvous()
        ranks = plan_ranks(graph, meeting.ranks)
        return run_together(meeting, ranks, "cpu", lambda team: train(experiment, team))
    except CreditgraphError as error:
        sys.stderr.write(f"creditgraph train: {error}\n")
        return 2


def rank_process(options, rank):
    output = os.open(f"{options.path}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": options.world,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": options.port,
    }
    os.environ.update({k: str(v) for k, v in variables.items()} if options.world > 1 else {})
    try:
        code = work(options)
    except BaseException:
        traceback.print_exc()
        code = 3
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def tell(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)

    tell("ready")
    for line in sys.stdin:
        options = Options(**json.loads(line))
        pids = []
        for rank in range(options.world):
            pid = os.fork()
            if not pid:
                rank_process(options, rank)
            pids.append(pid)
        begin = time.monotonic()
        ends = {pid: os.waitpid(pid, os.WUNTRACED)[1] for pid in pids}
        for pid, end in ends.items():
            if os.WIFSTOPPED(end):
                os.kill(pid, signal.SIGKILL)
                ends[pid] = os.waitpid(pid, 0)[1]
        codes = [os.waitstatus_to_exitcode(end) for end in ends.values()]
        tell([codes, time.monotonic() - begin])
