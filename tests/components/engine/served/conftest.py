"""Pools of real processes that speak vLLM's HTTP and start in milliseconds (fake_vllm.py), with faults on demand."""

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from creditgraph.components.engine.base import Limits
from creditgraph.components.engine.channel import ChannelSettings, FileChannel, Update
from creditgraph.components.engine.guard import descendants
from creditgraph.components.engine.rows import Rows
from creditgraph.components.engine.served.addresses import Address
from creditgraph.components.engine.served.dialect import ServedModel
from creditgraph.components.engine.served.pool import ServerPool
from creditgraph.components.engine.served.process import Launch
from creditgraph.components.engine.served.settings import PoolSettings
from creditgraph.components.engine.served.transfer import Transfer
from creditgraph.components.engine.vllm.dialect import VllmDialect
from creditgraph.components.engine.vllm.settings import VllmSettings
from creditgraph.components.text.stops import TokenText
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.core.streams import counter_seed

FAKE = Path(__file__).with_name("fake_vllm.py")
SPEC = importlib.util.spec_from_file_location("fake_vllm", FAKE)
fake = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fake)

QUICK = {"start_seconds": 60.0, "update_seconds": 30.0, "hang_seconds": 20.0, "stall_seconds": 60.0}


class Words:
    """Token id = code point."""

    def batch_decode(self, rows, **_):
        return ["".join(map(chr, row)) for row in rows]

    def decode(self, row, **_):
        return "".join(map(chr, row))


class FakeDialect(VllmDialect):
    """VllmDialect whose servers are `fake_vllm.py`."""

    def __init__(self, folder: Path, options=()):
        model = ServedModel(path="fake", dtype="float32", context_length=512, vocab_size=fake.VOCABULARY, eos=[1])
        super().__init__(VllmSettings(stream_tokens=3), model)
        self.folder, self.options = folder, list(options)

    sockets = False

    def launch(self, port: int, identity: str) -> Launch:
        index = identity.split("-")[1]
        own = ["--fault", str(self.folder / f"fault-{index}.json"), "--record", str(self.folder / "record.jsonl")]
        command = [sys.executable, "-S", "-E", str(FAKE), "--port", str(port), "--served-model-name", identity]
        return Launch(command=[*command, *own, *self.options], environment={"CREDITGRAPH_SERVER_KEY": "{key}"})


class Fleet:
    """A started pool with its channel; `generate` checks that every row gets the right tokens."""

    def __init__(self, folder: Path, servers: int = 3, options=(), addresses=(), channel=None, start=True, **settings):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "shm").mkdir(exist_ok=True)
        self.channel = FileChannel(
            ChannelSettings(**(channel or {"path": str(folder / "shm")})), torch.float32, near=True
        )
        self.settings = PoolSettings(**{**QUICK, **settings})
        where = list(addresses) or [Address(url="", name=f"server {n}") for n in range(servers)]
        self.learning = False
        self.pool = ServerPool(
            FakeDialect(folder, options),
            self.settings,
            where,
            folder,
            "engine",
            [self.channel.folder],
            may_start=lambda: not self.learning,
        )
        self.version = 0
        if start:
            self.pool.start()

    def fault(self, index: int, kind: str = "", **more) -> None:
        (self.folder / f"fault-{index}.json").write_text(json.dumps({"kind": kind, **more}))

    def load(self, version: int) -> None:
        tensors = {f"layer.{n}": torch.full((4, 3), float(version + n)) for n in range(12)}
        self.version = version
        self.pool.update(self.channel.publish(Weights(version=version, tensors=tensors)))
        self.channel.retire(version)

    def stream(self, version: int, source=None) -> Transfer:
        """Has the servers load the same from a stream, in buckets of three tensors."""

        def tensors():
            for n in range(12):
                yield f"layer.{n}", torch.full((4, 3), float(version + n))

        self.version = version
        transfer = Transfer(source or tensors, version, torch.float32, 3 * 48, None)
        self.pool.update(Update(version=version, checksum=transfer.checksum, transfer=transfer))
        return transfer

    def rows(self, prompts: int, group: int, max_tokens: int = 8, **sampling) -> Rows:
        count = prompts * group
        requests = Requests(
            tokens=Jagged.from_rows([[3, 4 + i // group] for i in range(count)], torch.int32),
            seed=torch.arange(100, 100 + count),
            sampling=Sampling(max_tokens=max_tokens, **sampling),
        )
        eos = torch.zeros(fake.VOCABULARY, dtype=torch.bool)
        limits = Limits(tokens=torch.full((count,), max_tokens), thoughts=torch.full((count,), 50), eos=eos)
        return Rows(requests, limits, TokenText(Words(), fake.VOCABULARY), Words(), fake.VOCABULARY)

    def run(self, rows: Rows):
        """Has the pool sample the rows."""
        self.pool.generate(rows.start(), rows.feed, rows.reset)
        return rows.completions()  # raises for a row that has not ended

    def generate(self, prompts: int = 6, group: int = 4, max_tokens: int = 8, version=None, streamed: bool = False):
        rows = self.rows(prompts, group, max_tokens, stop=("\x01\x01",) if streamed else ())
        done = self.run(rows)
        for row in range(prompts * group):
            assert done.tokens.row(row).tolist() == self.tokens(row, max_tokens)
        if version is not None:
            expected = self.logprobs(version, done.tokens.values.tolist())
            assert done.logprobs.values.tolist() == pytest.approx(expected)
        return done

    def tokens(self, row: int, count: int) -> list[int]:
        """What a server samples for a row."""
        seed = counter_seed(100 + row, 0)
        return [fake.token_at(seed, place) for place in range(count)]

    def logprobs(self, version: int, tokens: list[int]) -> list[float]:
        return [fake.logprob_at(version, token) for token in tokens]

    def records(self):
        file = self.folder / "record.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def key_file(self) -> str:
        file = self.folder / "key"
        file.touch(mode=0o600)
        file.write_text(self.pool.servers[0].address.key + "\n")
        return str(file)

    def pid(self, index: int) -> int:
        """Of the server itself, below its keeper and guard."""
        return descendants(self.pool.servers[index].process.pid)[1]

    def kill(self, index: int, number=signal.SIGKILL) -> None:
        os.kill(self.pid(index), number)

    def after(self, seconds: float, work) -> threading.Timer:
        timer = threading.Timer(seconds, work)
        timer.start()
        return timer

    def until(self, ready, seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, [(s.state, s.reason) for s in self.pool.servers]
            time.sleep(0.02)

    def states(self):
        return [s.state for s in self.pool.servers]

    def close(self) -> None:
        self.pool.close()
        self.channel.close()


@pytest.fixture
def fleet(tmp_path):
    """fleet(servers, **settings) → Fleet; all are closed, and nothing of them may be left."""
    made = []

    def make(servers=3, **options):
        made.append(Fleet(tmp_path / f"run{len(made)}", servers, **options))
        return made[-1]

    yield make
    pids = [s.process.pid for f in made for s in f.pool.servers if s.process is not None]
    trees = [p for pid in pids for p in (pid, *descendants(pid))]
    for one in made:
        one.close()
    assert not [
        pid
        for pid in trees
        if Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    ]
