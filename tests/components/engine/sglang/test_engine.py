"""A real SGLang server on the embedded model: against engine.local, after every kind of update, and in training."""

import asyncio
import contextlib
import dataclasses
import json
from pathlib import Path

import httpx
import pytest
import torch

from creditgraph.adapters.endpoint import EndpointPolicy
from creditgraph.components.engine.channel import ChannelSettings, FileChannel
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.engine.messages import RowRequest
from creditgraph.components.engine.served.dialect import ServerError
from creditgraph.components.engine.served.pool import AllServersLost
from creditgraph.components.engine.served.settings import PoolSettings
from creditgraph.components.engine.sglang import dialect as dialect_module
from creditgraph.components.engine.sglang import wire
from creditgraph.components.engine.sglang.engine import SGLangEngine
from creditgraph.components.engine.sglang.settings import ProcessSettings
from creditgraph.components.tasks import TASKS, chains
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.handles import Requests, Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights

CHAINS = TASKS["chains"]

ROOT = Path(__file__).resolve().parents[4]
PYTHON = ROOT / ".venv-sglang/bin/python"
PROCESS = ProcessSettings(python=str(PYTHON), environment={"PYTHONPATH": str(ROOT / "tests/sglang_cpu")})
needs_sglang = pytest.mark.skipif(
    not PYTHON.is_file(), reason="SGLang's environment is missing; make it with tools/other_environment sglang"
)
# test_contract.py checks the bodies of these with SGLang's own classes.
POSTED = [
    "/generate",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/begin_weight_update",
    "/end_weight_update",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/weights_checker",
]
# One server, which takes tens of seconds to start, for all tests of one worker.
pytestmark = pytest.mark.xdist_group("sglang")


class Pair:
    """engine.sglang with a server of its own and engine.local, always loaded with the same weights."""

    def __init__(self, folder, users_folder):
        self.local = LocalEngine(LocalEngine.Config())
        self.local.setup(Context(node="local"))
        self.sglang = SGLangEngine(SGLangEngine.Config(process=PROCESS, pool=PoolSettings(restarts=0)))
        with contextlib.chdir(users_folder):
            self.sglang.setup(Context(node="engine", run_dir=folder))
        server = json.loads((folder / "engines.json").read_text())["servers"][0]
        self.address = server["url"]
        self.headers = {"Authorization": f"Bearer {server['key']}"}
        self.key_file = folder / "key"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(server["key"])
        self.version = -1
        self.load(self.sglang)

    def weights(self, noise=0.0):
        """The next version: the embedded model's weights with relative noise."""
        from creditgraph.components.models.load import load_causal_lm
        from creditgraph.pipeline.core.component import ModelSpec

        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        own = {n: t for n, t in load_causal_lm(ModelSpec()).state_dict().items() if n not in self.sglang.names.tied}
        tensors = {n: t * (1 + noise * torch.randn(t.shape, generator=generator)) for n, t in own.items()}
        return Weights(version=self.version, tensors=tensors)

    def load(self, engine, noise=0.0):
        weights = self.weights(noise)
        return engine.run(weights=weights).policy, self.local.run(weights=weights).policy

    def connected(self, **settings):
        """Another engine on the same server."""
        fields = {"servers": 0, "addresses": (self.address,), "key_file": str(self.key_file), **settings}
        engine = SGLangEngine(SGLangEngine.Config(**fields))
        engine.setup(Context(node="engine"))
        return engine


@pytest.fixture(scope="module")
def pair(tmp_path_factory, users_folder):
    pair = Pair(tmp_path_factory.mktemp("sglang"), users_folder)
    yield pair
    pair.sglang.close()


@pytest.fixture(scope="module")
def requests(pair):
    """Five problems, four rows each."""
    problems = [CHAINS.generate(0, i, chains.Difficulty(hard_facts=None), "validation") for i in range(5)]
    prompts = [
        pair.sglang.tokenizer.encode(TASKS["chains"].solve_prompt(p["question"]), add_special_tokens=False)
        for p in problems
        for _ in range(4)
    ]

    def make(**sampling):
        tokens = Jagged.from_rows(prompts, torch.int32)
        return Requests(
            tokens=tokens,
            seed=torch.arange(len(prompts)) + (1 << 61),
            sampling=Sampling(**{"max_tokens": 64, **sampling}),
        )

    return make


def differences(policy, reference, batch, temperature=1.0):
    """Completions, and how far their log-probs and entropies are from the reference's scores of the same tokens."""
    done = policy.generate(batch)
    scores = reference.score(batch.tokens, done.tokens, temperature)
    logprobs = (scores.logprobs.values - done.logprobs.values).abs().max()
    entropies = (scores.entropies.values - done.entropies.values).abs().max()
    return done, float(logprobs), float(entropies)


@needs_sglang
def test_greedy_tokens_are_those_of_engine_local(pair, requests):
    policy, reference = pair.load(pair.sglang)
    # Rows of the last one end long before their requests would.
    for limits in (None, ThoughtLimits(max_tokens=16), ThoughtLimits(max_tokens=5, max_thoughts=2)):
        batch = requests(temperature=0.0, thoughts=limits)
        done, logprobs, entropies = differences(policy, reference, batch)
        expected = reference.generate(batch)
        assert done.tokens.to_lists() == expected.tokens.to_lists()
        assert done.thought_ends.to_lists() == expected.thought_ends.to_lists()
        assert (done.finish_reason, done.text) == (expected.finish_reason, expected.text)
        assert max(logprobs, entropies) < 1e-5


@needs_sglang
def test_samples_have_seeds_and_logprobs_before_truncation(pair, requests):
    policy, reference = pair.load(pair.sglang)
    batch = requests(temperature=1.3, top_p=0.9, top_k=20)
    done, logprobs, entropies = differences(policy, reference, batch, 1.3)
    assert max(logprobs, entropies) < 2e-5
    again = policy.generate(batch)
    assert again.tokens.to_lists() == done.tokens.to_lists()
    # A row depends on its own seed alone, and rows of one prompt differ.
    few = torch.tensor([5, 2, 17])
    alone = policy.generate(Requests(tokens=batch.tokens.select(few), seed=batch.seed[few], sampling=batch.sampling))
    assert alone.tokens.to_lists() == [done.tokens.to_lists()[i] for i in few.tolist()]
    assert len({tuple(row) for row in done.tokens.to_lists()[:4]}) > 1
    for temperature in (1.0, 0.6):
        got, expected = (p.score(batch.tokens, done.tokens, temperature) for p in (policy, reference))
        assert float((got.logprobs.values - expected.logprobs.values).abs().max()) < 2e-5
        assert float((got.entropies.values - expected.entropies.values).abs().max()) < 2e-5
        got, expected = (p.score(batch.tokens, done.tokens, temperature, top=25) for p in (policy, reference))
        torch.testing.assert_close(got.top_logprobs, expected.top_logprobs, atol=2e-5, rtol=1e-5)
        # But where two are equally likely.
        assert float((got.top_tokens == expected.top_tokens).float().mean()) > 0.99
    few = pair.connected(entropy_vocab=0)  # as for a vocabulary too large to be sent
    try:
        policy, reference = pair.load(few)
        got, expected = (p.score(batch.tokens, done.tokens, top=3) for p in (policy, reference))
        assert bool(got.entropies.values.isnan().all())
        torch.testing.assert_close(got.top_logprobs, expected.top_logprobs, atol=2e-5, rtol=1e-5)
    finally:
        few.close()


@needs_sglang
@needs_sglang
def test_graphs_of_other_trainers_ask_its_endpoint(pair, requests):
    _, reference = pair.load(pair.sglang)
    listed = httpx.get(f"{pair.address}/v1/models", headers=pair.headers).json()
    key = pair.headers["Authorization"].removeprefix("Bearer ")
    endpoint = EndpointPolicy(f"{pair.address}/v1", listed["data"][0]["id"], reference.tokenizer, key=key)
    greedy = requests(temperature=0.0, max_tokens=12)
    done, expected = endpoint.generate(greedy), reference.generate(greedy)
    assert done.tokens.to_lists() == expected.tokens.to_lists()
    assert (done.finish_reason, done.text) == (expected.finish_reason, expected.text)
    for found in (done.logprobs, endpoint.score(greedy.tokens, done.tokens).logprobs):
        torch.testing.assert_close(found.values, expected.logprobs.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["file", "broadcast", "ipc"])
def test_new_weights(pair, requests, kind, tmp_path):
    engine = pair.connected(channel=ChannelSettings(kind=kind, path=str(tmp_path), bucket_mb=1))
    try:
        batch = requests(temperature=1.0)
        before, _, _ = differences(*pair.load(engine), batch)
        for _ in range(2):  # the second one through a group that exists
            done, logprobs, _ = differences(*pair.load(engine, noise=0.1), batch)
            # Rounding; tokens of a stale cache or of the old weights would be off by tenths.
            assert logprobs < 1e-4
            assert done.tokens.to_lists() != before.tokens.to_lists()
            assert bool(list(tmp_path.iterdir())) == (kind == "file"), "only files are files"
    finally:
        engine.close()


@needs_sglang
def test_a_server_is_asked_for_hashes_once_and_gives_memory_back_only_where_it_was_started_for_it(pair, monkeypatch):
    """The real endpoints of sleeping; without a GPU nothing is freed, and weights survive."""
    asked = []
    checksum = wire.checksum_body
    monkeypatch.setattr(wire, "checksum_body", lambda: asked.append(1) or checksum())
    engine = pair.connected()
    try:
        pair.load(engine)
        pair.load(engine, noise=0.1)
        assert len(asked) == 1
        with pytest.raises(RunError, match=r"it cannot sleep: expected a server .*--enable-memory-saver.*sleep=never"):
            engine.backend.pool.sleep()
    finally:
        engine.close()
    dialect = pair.sglang.backend.pool._dialect

    async def scene():
        options = {"base_url": pair.address, "headers": pair.headers, "timeout": 60.0, "trust_env": False}
        async with httpx.AsyncClient(**options) as client:
            monkeypatch.setattr(
                "creditgraph.components.engine.sglang.dialect.call", saying_that_it_saves_memory(dialect_module.call)
            )
            await dialect.sleep(client)
            await dialect.wake(client, weights=True)
            await dialect.wake(client, weights=False)
            await dialect.resume(client)

    asyncio.run(asyncio.wait_for(scene(), 120.0))
    policy, reference = pair.load(pair.sglang, noise=0.1)
    context, tokens = (Jagged.from_rows([row], torch.int32) for row in ([5, 6], [7, 8]))
    got, expected = (p.score(context, tokens).logprobs.values for p in (policy, reference))
    assert float((got - expected).abs().max()) < 1e-4


def saying_that_it_saves_memory(real):
    async def call(client, method, path, *more, **named):
        reply = await real(client, method, path, *more, **named)
        return {**reply, "enable_memory_saver": True} if path == "/server_info" else reply

    return call


@needs_sglang
@pytest.mark.parametrize("where", ["file", "server"])
def test_corrupted_weights_are_caught(pair, monkeypatch, where):
    """Files that change after their publication, and a server that got other weights than the files hold."""
    from safetensors.torch import load_file, save_file

    publish = FileChannel.publish

    def corrupted(channel, weights):
        update = publish(channel, weights)
        file = Path(update.files[0])
        tensors = load_file(file)
        tensors[sorted(tensors)[3]] += 1e-3
        if where == "file":
            save_file(tensors, file)
            return update
        other = file.parent / "other"
        other.mkdir()
        save_file(tensors, other / file.name)
        return dataclasses.replace(update, path=str(other))

    engine = pair.connected(check_every=0, pool=PoolSettings(hang_seconds=0.5))
    try:
        monkeypatch.setattr(FileChannel, "publish", corrupted)
        with pytest.raises(AllServersLost, match=r"expected checksum \w+ of weights version \d+, the server reports"):
            engine.run(weights=pair.weights())
    finally:
        monkeypatch.undo()
        engine.close()


@needs_sglang
@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_pausing(pair, in_flight):
    pair.load(pair.sglang)  # whatever a failed update left
    dialect = pair.sglang.backend.pool._dialect
    request = RowRequest(
        row=0,
        group=0,
        tokens=[46, 5, 17, 12, 49],
        max_tokens=300,
        seed=3,
        stream=False,
        temperature=100.0,
        top_p=1.0,
        top_k=0,
    )
    # Hot enough that end-of-text is rare: some of these run for long.
    requests = [dataclasses.replace(request, seed=seed) for seed in range(16)]

    async def generate(client, request, name):
        responses = []

        def take(response, last):
            responses.append(response)
            return True

        await dialect.generate(client, request, f"{name}-{in_flight}-{request.seed}", take)
        return responses[0]

    async def scene():
        async with httpx.AsyncClient(
            base_url=pair.address, headers=pair.headers, timeout=60.0, trust_env=False
        ) as client:
            running = [asyncio.create_task(generate(client, r, "pausing")) for r in requests]
            while not await dialect._requests(client) and not all(task.done() for task in running):
                await asyncio.sleep(0.01)
            await dialect.pause(client, in_flight)
            responses = await asyncio.gather(*running)
            late = asyncio.create_task(generate(client, dataclasses.replace(request, max_tokens=3), "late"))
            await asyncio.sleep(0.3)
            waited = not late.done()
            await dialect.resume(client)
            given_up = asyncio.create_task(generate(client, dataclasses.replace(request, seed=77), "given-up"))
            await asyncio.sleep(0.1)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            return responses, waited, await late

    responses, waited, late = asyncio.run(asyncio.wait_for(scene(), 120.0))
    reasons = {response.reason for response in responses}
    assert reasons <= {"eos", "length"} if in_flight == "finish" else "abort" in reasons
    assert waited
    assert len(late.tokens) <= 3


@needs_sglang
def test_another_server_at_the_address_is_noticed(pair):
    async def scene():
        async with httpx.AsyncClient(
            base_url=pair.address, headers=pair.headers, timeout=60.0, trust_env=False
        ) as client:
            dialect = pair.sglang.backend.pool._dialect
            assert await dialect.ready(client, "")
            with pytest.raises(ServerError, match=r"expected server 'creditgraph-9-ab' at .*, got one started as"):
                await dialect.ready(client, "creditgraph-9-ab")

    asyncio.run(scene())


@needs_sglang
def test_endpoints_exist(pair):
    paths = httpx.get(f"{pair.address}/openapi.json", headers=pair.headers, timeout=60.0, trust_env=False).json()[
        "paths"
    ]
    endpoints = [("post", path) for path in POSTED] + [
        ("get", path) for path in ("/health", "/server_info", "/model_info", "/v1/loads")
    ]
    assert [(method, path) for method, path in endpoints if method not in paths.get(path, {})] == []


@needs_sglang
@pytest.mark.parametrize("kind", ["broadcast", "file"])
def test_training(pair, tmp_path, kind):
    """Toy SRPO, weights updated in every iteration, engine and learner at one in what they think of each token."""
    pair.load(pair.sglang)
    weights = tmp_path / "weights"
    settings = [
        "run.iterations=2",
        "evaluator.every=0",
        "data.eval.size=8",
        "evaluator.num_problems=8",
        "engine.servers=0",
    ]
    settings += ["prompts.batch=4", f"engine.channel.kind={kind}", f"engine.channel.path={weights}"]
    address = f"engine.addresses=['{pair.address.removeprefix('http://')}']"
    key = f"engine.key_file={pair.key_file}"
    assert (
        main(
            ["train", "recipe=toy_srpo", "engine=sglang", f"run.root={tmp_path}", "run.name=r", *settings, address, key]
        )
        == 0
    )
    rows = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()][:2]
    assert [row["learner/mismatch_abs_max"] < 5e-5 for row in rows] == [True] * 2
    assert all(row["engine/sampled_tokens"] > 200 and row["engine/servers_ready"] == 1 for row in rows)
    assert all(0 < row["engine/update_difference"] < 1e-4 for row in rows), "from the learner's own log-probs"
    assert weights.exists() == (kind == "file"), "the learner's tensors went straight to the server"


def test_settings_that_cannot_work():
    cases = [
        ({"servers": 0}, "expected servers, addresses or rendezvous, got none of them. Set engine.servers=1"),
        (
            {"process": ProcessSettings(python="/no/python")},
            "expected process.python to be an interpreter .*, got '/no/python', which is no file.*engine=local",
        ),
        ({}, "the package sglang is not installed in this environment.*engine.process.python"),
    ]
    for settings, text in cases:
        engine = SGLangEngine(SGLangEngine.Config(**settings))
        with pytest.raises(ConfigError, match=text):
            engine.setup(Context(node="engine"))
    with pytest.raises(ValueError, match="max_rows: expected at least 1, got 0"):
        SGLangEngine.Config(max_rows=0)
