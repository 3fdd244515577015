"""Every request of engine.sglang is one that the real SGLang package accepts, and its responses are understood."""

import asyncio
import base64
import dataclasses
import json
import math
import pickle
import subprocess
from concurrent.futures import Future
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from creditgraph.components.engine.bucket import in_buckets
from creditgraph.components.engine.channel import Update
from creditgraph.components.engine.group import Meeting
from creditgraph.components.engine.messages import BadResponse, RowRequest, ScoreRequest, check_score
from creditgraph.components.engine.served.dialect import ServedModel, ServerError
from creditgraph.components.engine.served.parts import Part
from creditgraph.components.engine.sglang import wire
from creditgraph.components.engine.sglang.checks import (
    expected_hashes,
    first_difference,
    hash_on_cpu,
    hash_on_gpu,
    parts_of,
)
from creditgraph.components.engine.sglang.dialect import SGLangDialect
from creditgraph.components.engine.sglang.settings import SGLangSettings
from creditgraph.components.engine.weight_files import Checksum
from creditgraph.pipeline.core.errors import ConfigError

# One process of SGLang for all of these tests.
pytestmark = pytest.mark.xdist_group("sglang")
ROOT = Path(__file__).resolve().parents[4]
PYTHON = ROOT / ".venv-sglang/bin/python"
ROW = RowRequest(
    row=0, group=0, tokens=[5, 6, 7], max_tokens=9, seed=2**63 - 1, temperature=1.0, top_p=1.0, top_k=0, stream=False
)
SCORE = ScoreRequest(row=0, group=0, context=[5, 6], tokens=[7, 8, 9], temperature=1.0)
TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.bias": torch.arange(3).to(torch.bfloat16),
    "c.weight": torch.ones(4),
}
MEETING = Meeting(name="g-1", address="127.0.0.1", port=8123, backend="gloo", world=5, seconds=9.0)
BUCKETS = list(in_buckets(TENSORS.items(), 7, torch.float32, 40, Checksum()))
LAUNCHES = [
    SGLangDialect(SGLangSettings(**settings), ServedModel(path="/m", context_length=64, vocab_size=9, **model))
    .launch(8123, "name")
    .command[2:]
    for model in (
        {"dtype": "float32", "device": "cpu"},
        {"dtype": "bfloat16", "device": "cuda"},
        {"dtype": "bfloat16", "device": "cuda", "sleeps": True},
    )
    for settings in (
        {},
        {"deterministic": False, "tensor_parallel": 2, "gpu_memory": 0.85, "return_routed_experts": True},
    )
]
PART = SGLangDialect(
    SGLangSettings(tensor_parallel=4),
    ServedModel(path="/m", context_length=64, vocab_size=9, dtype="bfloat16", device="cuda"),
    Part(nodes=2, rank=1, host="10.0.0.2", meeting="10.0.0.1:2345"),
).launch(8123, "name")
LAUNCHES.append(PART.command[2:])

GOOD = {
    "sampled": ("/generate", wire.generate_body(ROW, "r", 54)),
    "without entropies": ("/generate", wire.generate_body(ROW, "r", 0)),
    "greedy": ("/generate", wire.generate_body(dataclasses.replace(ROW, temperature=0.0, top_p=0.5, top_k=3), "r", 54)),
    "truncated": (
        "/generate",
        wire.generate_body(dataclasses.replace(ROW, temperature=1.7, top_p=0.5, top_k=3), "r", 54),
    ),
    "past end of text": ("/generate", wire.generate_body(dataclasses.replace(ROW, ignore_eos=True), "r", 0)),
    "streamed": ("/generate", wire.streamed(wire.generate_body(ROW, "r", 54), 8)),
    "experts": ("/generate", wire.generate_body(ROW, "r", 0, experts=True)),
    "score": ("/generate", wire.score_body(SCORE, "r", 54)),
    "score without entropies": ("/generate", wire.score_body(SCORE, "r", 0)),
    "most likely tokens": ("/generate", wire.score_body(dataclasses.replace(SCORE, top=3), "r", 0)),
    "disk": ("/update_weights_from_disk", wire.disk_body("/dev/shm/weights", "7-ab")),
    "group": ("/init_weights_update_group", wire.group_body(MEETING, 3)),
    "no group": ("/destroy_weights_update_group", {"group_name": "g-1"}),
    "begin": ("/begin_weight_update", {}),
    "broadcast": ("/update_weights_from_distributed", wire.broadcast_body("g-1", BUCKETS[0])),
    "last broadcast": ("/update_weights_from_distributed", wire.broadcast_body("g-1", BUCKETS[1])),
    "tensors": ("/update_weights_from_tensor", wire.tensor_body(BUCKETS[0], 1)),
    "last tensors": ("/update_weights_from_tensor", wire.tensor_body(BUCKETS[1], 1)),
    "end": ("/end_weight_update", {}),
    "sleep": ("/release_memory_occupation", {}),
    "wake for weights": ("/resume_memory_occupation", wire.resume_body(True)),
    "wake": ("/resume_memory_occupation", wire.resume_body(False)),
    "pause": ("/pause_generation", {"mode": "abort"}),
    "resume": ("/continue_generation", {"torch_empty_cache": False}),
    "abort": ("/abort_request", wire.abort_body("r")),
    "abort all": ("/abort_request", wire.abort_body(None)),
    "checksum": ("/weights_checker", wire.checksum_body()),
}
# What the check must refuse, so that its acceptance means something.
BAD = {
    "unknown field": ("/generate", {**wire.generate_body(ROW, "r", 0), "return_logprobs": True}),
    "unknown sampling parameter": (
        "/generate",
        {**wire.generate_body(ROW, "r", 0), "sampling_params": {"max_tokens": 3}},
    ),
    "seed out of range": ("/generate", wire.generate_body(dataclasses.replace(ROW, seed=2**63), "r", 0)),
    "no path": ("/update_weights_from_disk", {"weight_version": "7"}),
    "version as a number": ("/update_weights_from_disk", {"model_path": "/x", "weight_version": 7}),
    "unknown mode": ("/pause_generation", {"mode": "keep"}),
    "tags as text": ("/resume_memory_occupation", {"tags": "weights"}),
    "tensors as a list": ("/update_weights_from_tensor", {"serialized_named_tensors": [[1]]}),
    "text as ids": ("/generate", {**wire.generate_body(ROW, "r", 0), "input_ids": "abc"}),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Verdicts of SGLang's own classes, from one process of its environment."""
    if not PYTHON.is_file():
        pytest.skip("SGLang's environment is missing; make it with tools/other_environment sglang")
    answer = tmp_path_factory.mktemp("contract") / "answer.json"
    words = [[1, 2, 3], list(range(-9000, 9000))]
    launches = [*LAUNCHES, ["--model-path", "/m", "--no-such-argument"]]
    pickled = wire.pickled(BUCKETS[0].views)
    inputs = {"bodies": [*GOOD.values(), *BAD.values()], "hashes": words, "answer": str(answer)}
    inputs |= {"launches": launches, "pickled": pickled}
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("sglang_contract.py")],
        input=json.dumps(inputs),
        capture_output=True,
        text=True,
        timeout=900,
        env={
            "PYTHONPATH": str(ROOT / "tests/sglang_cpu"),
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    output = json.loads(answer.read_text())
    problems = dict(zip([*GOOD, *BAD], output["problems"], strict=True))
    hashes = list(zip(words, output["hashes"], strict=True))
    return {"problems": problems, "hashes": hashes, "launches": output["launches"], "opened": output["opened"]}


def test_bodies_are_accepted(verdicts):
    assert {name: verdicts["problems"][name] for name in GOOD} == dict.fromkeys(GOOD, "")


def test_wrong_bodies_are_refused(verdicts):
    assert [name for name in BAD if not verdicts["problems"][name]] == []


def test_start_arguments_are_those_of_sglangs_parser(verdicts):
    *parsed, refused = verdicts["launches"]
    assert "--no-such-argument" in refused
    names = (
        "enable_memory_saver",
        "enable_deterministic_inference",
        "mem_fraction_static",
        "tp_size",
        "enable_return_routed_experts",
    )
    assert [[one[name] for name in names] for one in parsed] == [
        [False, True, 0.3, 1, False],
        [False, False, 0.3, 2, True],
        [False, True, 0.5, 1, False],
        [False, False, 0.85, 2, True],
        [True, True, 0.5, 1, False],
        [True, False, 0.85, 2, True],
        [False, True, 0.5, 4, False],
    ]
    assert [parsed[-1][name] for name in ("nnodes", "node_rank", "dist_init_addr")] == [2, 1, "10.0.0.1:2345"]
    assert PART.environment["SGLANG_HOST_IP"] == "10.0.0.2"


def test_sglang_opens_what_is_sent_by_value(verdicts):
    expected = [[name, t.float().flatten().tolist()] for name, t in BUCKETS[0].tensors.items()]
    assert verdicts["opened"] == expected


def test_tensors_on_a_gpu_are_sent_as_handles_with_the_id_of_the_gpu(monkeypatch):
    """CUDA by mocks: a tensor that says it is on a GPU, and torch's own names of a handle's parts."""
    from torch.multiprocessing import reductions

    monkeypatch.setattr(wire, "gpu_id", lambda device: f"GPU-of-{device}")
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda:3"))
    given = ["c", "size", "stride", 4, "s", "dtype", 3, b"h", 99, 16, False, b"r", 0, b"e", True]
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, tuple(given)))
    sent = wire.pickled([("a.weight", TENSORS["a.weight"])])
    opened = []
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *parts: opened.append(list(parts)))
    pickle.loads(base64.b64decode(sent))
    assert opened == [[*given[:6], "GPU-of-cuda:3", *given[7:]]]


def test_gpu_hash_is_that_of_sglangs_kernel(verdicts):
    for words, expected in verdicts["hashes"]:
        assert f"{hash_on_gpu(torch.tensor(words, dtype=torch.int32)):016x}" == expected


def generated(**changes):
    meta = {
        "finish_reason": {"type": "stop", "matched": 1},
        "output_token_logprobs": [[-0.5, 4, None], [math.log(0.5), 1, None]],
        "output_top_logprobs": [
            [[0.0, 4, None], [-1e30, 1, None]],
            [[math.log(0.5), 1, None], [math.log(0.5), 4, None]],
        ],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    return {"output_ids": [4, 1], "text": "", "meta_info": {**meta, **changes}}


def test_responses():
    response, version = wire.read_generated(generated(), True)
    assert (response.tokens, response.reason, version) == ([4, 1], "eos", "3")
    # One certain token: 0; two equal ones: log 2.
    assert response.entropies == pytest.approx([0.0, math.log(2)])
    for finish, reason in (
        ({"type": "stop", "matched": "}"}, "stop"),
        ({"type": "abort", "message": ""}, "abort"),
        ({"type": "length", "length": 2}, "length"),
    ):
        response, _ = wire.read_generated(generated(finish_reason=finish), False)
        assert (response.reason, response.entropies) == (reason, None)
    # JSON has no NaN.
    response, _ = wire.read_generated(generated(output_token_logprobs=[[-0.5, 4, None], [None, 1, None]]), False)
    assert response.logprobs[0] == -0.5
    assert math.isnan(response.logprobs[1])
    # Experts of a prompt of three tokens and all sampled ones but the last, in two layers, two of each.
    experts = np.arange(16, dtype=np.int32) * 20
    sent = {"routed_experts": base64.b64encode(experts.tobytes()).decode(), "prompt_tokens": 3, "completion_tokens": 2}
    response, _ = wire.read_generated(generated(**sent), False)
    assert (response.routed_experts.dtype, response.routed_experts.shape) == (np.int16, (4, 4))
    assert response.routed_experts.flatten().tolist() == experts.tolist()
    # SGLang's own word for weights that nobody numbered.
    unnumbered = generated(weight_versions=[{"version": "default", "start": 0, "end": 2}])
    assert wire.read_generated(unnumbered, False)[1] == "default"


def test_a_response_without_its_fields_is_a_server_error():
    for body in (
        {},
        {"error": {"message": "x"}},
        [],
        None,
        generated(finish_reason=None),
        generated(output_token_logprobs=[["?"]]),
        generated(routed_experts="AAAA", prompt_tokens=3, completion_tokens=2),
    ):
        with pytest.raises(ServerError, match="a response without the expected fields"):
            wire.read_generated(body, False)
    with pytest.raises(ServerError, match="expected finish reason stop, length or abort, got 'unheard'"):
        wire.read_generated(generated(finish_reason={"type": "unheard"}), False)


@pytest.mark.parametrize("incremental", [True, False])
def test_events_of_a_stream_add_up(incremental):
    tokens, logprobs, seen, taken = [7, 3, 9, 4], [-0.1, -0.2, -0.3, -0.4], [], 0
    for begin, end, finish in ((0, 1, None), (1, 3, None), (3, 4, {"type": "length"}), (4, 4, {"type": "abort"})):
        start = begin if incremental else 0
        meta = {"id": "r", "finish_reason": finish, "completion_tokens": end, "weight_version": "5"}
        meta["output_token_logprobs"] = [[logprobs[i], tokens[i], None] for i in range(start, end)]
        meta["output_top_logprobs"] = [[[0.0, 1, None]]] * (end - start)
        event = {"output_ids": tokens[start:end], "meta_info": meta}
        part, last, version = wire.read_event(json.dumps(event), taken, True, "r")
        taken += len(part.tokens)
        seen += zip(part.tokens, part.logprobs, part.entropies, strict=True)
        assert (last, version) == (finish is not None, "5")
        assert finish is None or part.reason == finish["type"]
    assert seen == list(zip(tokens, logprobs, [0.0] * 4, strict=True))
    for text in ("{", '{"error": {"message": "no"}}'):
        with pytest.raises(ServerError, match="a response without the expected fields"):
            wire.read_event(text, 0, True, "r")


def test_scores_at_another_temperature():
    torch.manual_seed(0)
    logits = torch.randn(3, 5)
    tokens, temperature = [1, 4, 0], 0.7
    plain, scaled = logits.log_softmax(-1), (logits / temperature).log_softmax(-1)
    body = {
        "meta_info": {
            "input_token_logprobs": [[None, 6, None], *([float(plain[i, t]), t, None] for i, t in enumerate(tokens))],
            "input_top_logprobs": [None, *([[float(v), i, None] for i, v in enumerate(row)] for row in plain)],
            "weight_version": "3",
        }
    }
    request = ScoreRequest(row=0, group=0, context=[6], tokens=tokens, temperature=temperature, vocab_size=5)
    response = wire.read_scores(body, request, True)
    assert response.logprobs == pytest.approx([float(scaled[i, t]) for i, t in enumerate(tokens)], abs=1e-6)
    assert response.entropies == pytest.approx((-(scaled.exp() * scaled).sum(-1)).tolist(), abs=1e-6)
    assert response.top_tokens == response.top_logprobs == []
    # SGLang has the most likely first. At temperature 1 their own log-probs serve, without the rest of the vocabulary.
    first = plain.sort(dim=-1, descending=True)
    for whole, count, expected in ((True, 5, scaled), (False, 2, plain)):
        some = zip(first.values[:, :count].tolist(), first.indices[:, :count].tolist(), strict=True)
        body["meta_info"]["input_top_logprobs"] = [
            None,
            *([[v, i, None] for v, i in zip(*x, strict=True)] for x in some),
        ]
        two = dataclasses.replace(request, top=2, temperature=0.7 if whole else 1.0)
        response = check_score(two, wire.read_scores(body, two, whole))
        assert response.top_tokens == first.indices[:, :2].flatten().tolist()
        wanted = expected.gather(1, first.indices[:, :2]).flatten().tolist()
        assert response.top_logprobs == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(BadResponse, match=r"expected 9 most likely tokens, 3 in each place, got 6 with 6 log-probs"):
        check_score(dataclasses.replace(two, top=3), response)
    for token in (-1, 5):
        foreign = dataclasses.replace(response, top_tokens=[*response.top_tokens[:-1], token])
        with pytest.raises(
            BadResponse, match=r"score row 0: expected most likely tokens of the vocabulary, ids below 5"
        ):
            check_score(two, foreign)
    with pytest.raises(ConfigError, match=r"expected scores at temperature 1, got temperature 0\.7"):
        wire.score_body(request, "r", 0)


def test_a_bucket_is_described_in_the_order_of_its_bytes():
    mixed = {**TENSORS, "b.bias": torch.arange(3)}  # of int64, which keeps its dtype
    (bucket,) = in_buckets(mixed.items(), 7, torch.bfloat16, 1000, Checksum())
    body = wire.broadcast_body("g", bucket)
    assert body["names"] == ["b.bias", "a.weight", "c.weight"]
    assert body["dtypes"] == ["int64", "bfloat16", "bfloat16"]
    assert body["shapes"] == [[3], [2, 3], [4]]
    assert (body["weight_version"], body["flush_cache"]) == (bucket.label, True)
    assert bucket.label.startswith("7-")
    first, last = BUCKETS
    assert "weight_version" not in wire.tensor_body(first, 1)
    sent = wire.tensor_body(last, 2)["serialized_named_tensors"]
    opened = [[(name, t.tolist()) for name, t in pickle.loads(base64.b64decode(x))] for x in sent]
    assert opened == [[(name, t.tolist()) for name, t in last.views]] * 2


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(70, 4),
        **{f"model.layers.{n}.self_attn.{p}_proj.weight": torch.randn(4, 4) for n in (0, 1) for p in "qkvo"},
        "model.norm.weight": torch.randn(4),
    }


def held(weights, hashed):
    """SGLang's table for these weights: stacked projections, a vocabulary padded to 128 rows."""
    table = {"model.norm.weight": weights["model.norm.weight"]}
    table["model.embed_tokens.weight"] = torch.cat([weights["model.embed_tokens.weight"], torch.zeros(58, 4)])
    for n in (0, 1):
        table[f"model.layers.{n}.self_attn.qkv_proj.weight"] = torch.cat(
            [weights[f"model.layers.{n}.self_attn.{p}_proj.weight"] for p in "qkv"]
        )
        table[f"model.layers.{n}.self_attn.o_proj.weight"] = weights[f"model.layers.{n}.self_attn.o_proj.weight"]
    return {name: f"{hashed(tensor):016x}" for name, tensor in table.items()}


@pytest.mark.parametrize("cuda", [False, True])
def test_hashes_of_a_server_are_compared(weights, cuda):
    expected = expected_hashes(weights, torch.float32, cuda)
    hashed = hash_on_gpu if cuda else hash_on_cpu
    assert first_difference(expected, [held(weights, hashed)]) == ""
    for name in weights:
        changed = {**weights, name: weights[name] + 1e-6}
        reported = first_difference(expected, [held(changed, hashed)])
        assert reported is not None
        assert f"for '{parts_of(name)[0]}'" in reported
    assert first_difference(expected, [{"other": "0"}]) is None
    norm = {"model.norm.weight": expected["model.norm.weight"]}
    assert first_difference(expected, [norm, norm]) == ""
    assert str(first_difference(expected, [norm, {}])).startswith("None for 'model.norm.weight'"), "one rank lacks it"


def test_weights_that_another_process_publishes_are_compared_there():
    """A replica that shares servers has no files of the update; version and probe are what it can check."""

    async def scene():
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"weight_version": "4"}))
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
            dialect = SGLangDialect(
                SGLangSettings(), ServedModel(path="m", dtype="float32", context_length=8, vocab_size=9)
            )
            return await dialect.reported(client, Update(version=4, checksum=Future(), loaded=True))

    assert asyncio.run(scene()) == ("4", None)
