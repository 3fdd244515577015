"""Generation against transformers' `generate`, its forward, and a slow loop; cuts, limits and errors."""

import pytest
import torch
from slow_generation import slow_generation

from creditgraph.components.engine.local.cache import entries_of
from creditgraph.components.engine.local.decoder import TransformersDecoder
from creditgraph.components.engine.local.generate import _compacted
from creditgraph.components.engine.local.lean import LeanDecoder
from creditgraph.components.engine.local.waves import waves
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError
from creditgraph.pipeline.core.handles import Requests, Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights

KINDS = ["qwen2", "qwen3", "llama", "llama3", "gpt2", "gemma2"]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate(kind, start, prompts, ask):
    policy, model = start(kind)
    done = ask(policy, [p for p in prompts for _ in range(2)], temperature=0.0, max_tokens=20)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=1, pad_token_id=0
        )
        assert out[0, len(prompt) :].tolist() == done.tokens.row(2 * i).tolist() == done.tokens.row(2 * i + 1).tolist()
    assert {"eos", "length"} >= set(done.finish_reason)


def test_known_architectures_take_the_lean_decoder_and_others_do_not(start):
    kinds = {kind: type(start(kind)[0].engine.decoder) for kind in KINDS}
    assert kinds == dict.fromkeys(["qwen2", "qwen3", "llama", "llama3"], LeanDecoder) | dict.fromkeys(
        ["gpt2", "gemma2"], TransformersDecoder
    )
    with pytest.raises(
        ConfigError, match=r"decoder 'lean' cannot run this model: model type 'gpt2' is not one of qwen2, qwen3, llama"
    ):
        start("gpt2", decoder="lean")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gpt2", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropies_are_those_of_the_forward(kind, temperature, start, prompts, ask):
    policy, model = start(kind)
    done = ask(policy, prompts, temperature=temperature, max_tokens=25)
    scored = policy.score(Jagged.from_rows(prompts, torch.int32), done.tokens, temperature)
    for i, prompt in enumerate(prompts):
        tokens = done.tokens.row(i).long()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens.tolist()], device=model.device)).logits[0].cpu()
        whole = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
        expected, entropy = whole.gather(1, tokens[:, None])[:, 0], -(whole.exp() * whole).sum(-1)
        for got in (done, scored):
            torch.testing.assert_close(got.logprobs.row(i), expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(got.entropies.row(i), entropy, rtol=0, atol=1e-5)


PLAIN = {"temperature": 1.0, "max_tokens": 30, "stop": ("</thought>", "3")}
CUT = {"temperature": 1.3, "top_p": 0.8, "top_k": 12, "max_tokens": 30}
THOUGHTS = {"max_tokens": 40, "thoughts": ThoughtLimits(max_tokens=7, max_thoughts=5)}
PAST_EOS = {"max_tokens": 60, "thoughts": ThoughtLimits(max_tokens=16, max_thoughts=5, ends_at_eos=False)}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [PLAIN, CUT, THOUGHTS, THOUGHTS | {"max_tokens": 16}, PAST_EOS])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_sampling_equals_the_slow_loop(kind, sampling, start, prompts, ask):
    policy, model = start(kind)
    rows, seeds = [p for p in prompts for _ in range(3)], [100 + 7 * i for i in range(18)]
    done = ask(policy, rows, seeds, **sampling)
    # Half of the rows, those that ended for the rarest reasons first.
    reasons = done.finish_reason
    for i in sorted(range(18), key=lambda i: reasons.count(reasons[i]))[:9]:
        expected = slow_generation(model, policy.tokenizer, rows[i], seeds[i], Sampling(**sampling), {1})
        tokens, logprobs, entropies, ends, reason = expected
        assert done.tokens.row(i).tolist() == tokens
        assert (done.thought_ends.row(i).tolist(), done.finish_reason[i]) == (ends, reason)
        torch.testing.assert_close(done.logprobs.row(i), torch.tensor(logprobs), rtol=0, atol=1e-5)
        torch.testing.assert_close(done.entropies.row(i), torch.tensor(entropies), rtol=0, atol=1e-5)
        assert done.text[i] == policy.tokenizer.decode(tokens)
    assert sampling is CUT or len(set(done.finish_reason)) > 1


def test_end_of_text_may_close_its_thought_only(start, prompts, ask):
    policy, _ = start()
    rows = [p for p in prompts for _ in range(20)]
    inside = alone = 0
    done = ask(policy, rows, list(range(len(rows))), temperature=2.0, **PAST_EOS)
    for i, reason in enumerate(done.finish_reason):
        tokens = done.tokens.row(i).tolist()
        ends = done.thought_ends.row(i).tolist()
        places = [t for t, token in enumerate(tokens, 1) if token == 1]
        if reason == "eos":
            # Nothing but the token since the last thought, to which it belongs, as no thought is empty.
            assert places.pop() == len(tokens) == ends[-1]
            assert len(tokens) == 1 or tokens[-2] in (1, 3) or len(tokens) - 1 - (ends[-2] if ends[1:] else 0) == 16
            alone += 1
        assert set(places) - {len(tokens) - 1} <= set(ends)
        inside += len(places)
    assert alone > 3
    assert inside > 20
    # By default the first one ends the response.
    limits = ThoughtLimits(max_tokens=16, max_thoughts=5)
    ended = ask(policy, rows, list(range(len(rows))), temperature=2.0, max_tokens=60, thoughts=limits)
    assert all(1 not in tokens[:-1] for tokens in ended.tokens.to_lists())


@pytest.mark.parametrize(("settings", "room"), [({"max_rows": 1}, 9999), ({"max_rows": 4}, 9999), ({}, 100)])
def test_results_do_not_depend_on_the_cut_or_on_other_rows(settings, room, start, prompts, ask, monkeypatch):
    rows, seeds = [p for p in prompts for _ in range(3)], list(range(18))
    whole = ask(start()[0], rows, seeds, **PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr("creditgraph.components.engine.local.engine.tokens_in_free_memory", lambda *_: room)
        cut = ask(start(**settings)[0], rows, seeds, **PLAIN)
    assert whole.tokens.to_lists() == cut.tokens.to_lists()
    torch.testing.assert_close(whole.logprobs.values, cut.logprobs.values, rtol=0, atol=1e-5)
    order = [11, 3, 7]
    some = ask(start()[0], [rows[i] for i in order], order, **PLAIN)
    assert some.tokens.to_lists() == [whole.tokens.row(i).tolist() for i in order]


def test_rows_that_ended_may_stay_for_some_steps(start, prompts, ask, monkeypatch):
    rows = [p for p in prompts for _ in range(3)]
    at_once = ask(start()[0], rows, **THOUGHTS)
    monkeypatch.setattr("creditgraph.components.engine.local.generate.LOOK_EVERY", {"cpu": 7, "cuda": 7})
    late = ask(start()[0], rows, **THOUGHTS)
    assert at_once.tokens.to_lists() == late.tokens.to_lists()
    assert at_once.thought_ends.to_lists() == late.thought_ends.to_lists()
    assert at_once.finish_reason == late.finish_reason
    monkeypatch.setattr("creditgraph.components.engine.local.generate.LEAVE_SHARE", 2.0)
    # A row at the end of the context (learned positions) stays beside one that goes on.
    done = ask(start("gpt2")[0], [[5] * 94, [6]], temperature=0.0, max_tokens=60)
    assert done.finish_reason[0] == "length"
    assert len(done.tokens.row(0)) == 2


def test_groups_of_any_size_share_prompts(start, ask):
    counts = [1, 9, 2, 1, 5, 1]
    rows = [[7 + i] * (3 + 2 * i) for i, n in enumerate(counts) for _ in range(n)]
    lean, plain = (ask(start("qwen2", decoder=d)[0], rows, max_tokens=40) for d in ("lean", "transformers"))
    assert lean.tokens.to_lists() == plain.tokens.to_lists()
    torch.testing.assert_close(lean.logprobs.values, plain.logprobs.values, rtol=0, atol=1e-5)


def test_entries_of_groups():
    prompt, place, members = entries_of(torch.tensor([2, 0, 2, 2, 0, 1]))
    assert members == 3
    assert prompt.tolist() == [0, 1, 2]
    assert place.tolist() == [6, 0, 7, 8, 1, 3]
    prompt, place, members = entries_of(torch.arange(40))
    assert (members, prompt.tolist(), place.tolist()) == (1, list(range(40)), list(range(40)))
    # One big group among single rows is cut, so that no prompt carries many empty places.
    prompt, place, members = entries_of(torch.cat([torch.zeros(64, dtype=torch.int64), torch.arange(1, 101)]))
    assert len(prompt) * members <= 4 * 164
    assert len(set(place.tolist())) == 164


def test_both_decoders_sample_the_same_tokens(start, prompts, ask):
    rows = [p for p in prompts for _ in range(4)]
    lean, plain = (ask(start("qwen3", decoder=d)[0], rows, **CUT) for d in ("lean", "transformers"))
    assert lean.tokens.to_lists() == plain.tokens.to_lists()


def test_long_responses_grow_the_cache(start, ask, folder):
    policy, model = start("llama3", max_context=96)
    done = ask(policy, [[5, 6, 7], [8]], temperature=0.0, max_tokens=500)
    for i, prompt in enumerate([[5, 6, 7], [8]]):
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_length=96, eos_token_id=1, pad_token_id=0
        )
        assert done.tokens.row(i).tolist() == out[0, len(prompt) :].tolist()


def test_limits_per_row(start, ask):
    policy, _ = start()
    done = ask(policy, [[5, 6]] * 4, [1, 1, 1, 1], max_tokens_each=torch.tensor([0, 1, 3, 9]), max_tokens=2)
    assert [len(r) for r in done.tokens.rows()][:2] == [0, 1]
    longest = done.tokens.row(3).tolist()
    assert all(row.tolist() == longest[: len(row)] for row in done.tokens.rows())
    thoughts = ThoughtLimits(max_tokens=2, final="never")
    done = ask(policy, [[5, 6]] * 2, [4, 4], thoughts=thoughts, max_thoughts_each=torch.tensor([1, 3]), max_tokens=30)
    assert [len(r) for r in done.thought_ends.rows()] == [1, 3]
    assert done.finish_reason == ["thoughts", "thoughts"]


def test_equal_prompts_are_prefilled_once(start, prompts, ask):
    policy, _ = start()
    ask(policy, [p for p in prompts for _ in range(4)], max_tokens=3)
    metrics = policy.engine.context.metrics
    assert metrics["prefill_tokens"] == sum(map(len, prompts))
    before = metrics["sampled_tokens"]
    again = ask(policy, prompts, max_tokens=3)
    assert metrics["sampled_tokens"] == before + len(again.tokens.values)
    policy.engine.context.iteration += 1
    ask(policy, prompts, max_tokens=3)
    assert metrics["sampled_tokens"] == len(again.tokens.values)
    assert metrics["seconds_generate"] > 0


def test_context_limits(start, ask):
    policy, _ = start(max_context=12)
    policy.engine.eos[:] = False
    done = ask(policy, [[5] * 10, [6] * 12, [7] * 30], temperature=0.0, max_tokens=50)
    assert [len(r) for r in done.tokens.rows()] == [2, 0, 0]
    assert done.finish_reason == ["length"] * 3
    reasons = [r["reason"] for r in policy.engine.context.rejected]
    assert reasons[0] == "prompt of 12 tokens leaves no room in a context of 12; its completion is empty"
    assert policy.engine.context.metrics["rows_without_room"] == 2
    with pytest.raises(
        CreditgraphError, match=r"score: expected rows of at most 12 tokens .*, got 13. Shorten prompt plus response"
    ):
        policy.score(Jagged.from_rows([[5] * 10], torch.int32), Jagged.from_rows([[6] * 3], torch.int32))


def test_bad_requests_get_a_sentence(start, ask):
    policy, model = start()
    with pytest.raises(CreditgraphError, match=r"request 1: expected at least one token"):
        ask(policy, [[5], []])
    with pytest.raises(
        CreditgraphError, match=r"expected token ids from 0 to \d+, got 5 to 999. Prompts must come from the tokenizer"
    ):
        ask(policy, [[5, 999]])
    with pytest.raises(CreditgraphError, match=r"expected temperature ≥ 0, 0 < top_p ≤ 1 .* top_p 0.0"):
        ask(policy, [[5]], top_p=0.0)
    with pytest.raises(CreditgraphError, match=r"expected stop strings of at least one character"):
        ask(policy, [[5]], stop=("",))
    with pytest.raises(CreditgraphError, match=r"score: expected one context per row, got 2 contexts for 1 rows"):
        policy.score(Jagged.from_rows([[5], [6]], torch.int32), Jagged.from_rows([[5]], torch.int32))
    with pytest.raises(CreditgraphError, match=r"score context 0: expected at least one token"):
        policy.score(Jagged.from_rows([[]], torch.int32), Jagged.from_rows([[5]], torch.int32))
    broken = {k: v * float("nan") for k, v in model.state_dict().items()}
    bad = policy.engine.run(weights=Weights(version=4, tensors=broken)).policy
    with pytest.raises(
        CreditgraphError,
        match=r"row 0: expected finite log-probs, .* from weights version 4\. .* lower the learning rate",
    ):
        ask(bad, [[5]], max_tokens=2)
    with pytest.raises(CreditgraphError, match=r"a policy handle of version 3 was used after version 4 was loaded"):
        ask(policy, [[5]])


def test_no_rows(start):
    policy, _ = start()
    nothing = Jagged.from_rows([], torch.int32)
    done = policy.generate(Requests(tokens=nothing, seed=torch.zeros(0, dtype=torch.int64), sampling=Sampling()))
    assert (len(done.tokens), done.text, done.finish_reason) == (0, [], [])
    assert len(policy.score(nothing, nothing).logprobs) == 0


def test_score_batches_do_not_change_scores(start, prompts):
    rows = Jagged.from_rows([[7] * n for n in (3, 0, 40, 9, 1, 12)], torch.int32)
    context = Jagged.from_rows(prompts, torch.int32)
    one, many = (start(score_tokens=n)[0].score(context, rows, 0.8) for n in (1, 100000))
    torch.testing.assert_close(one.logprobs.values, many.logprobs.values, rtol=0, atol=1e-5)
    assert one.entropies.lengths.tolist() == rows.lengths.tolist()


def test_bfloat16_stays_near_the_forward(start, prompts, ask):
    policy, _model = start("qwen3", dtype="bfloat16")
    assert isinstance(policy.engine.decoder, LeanDecoder)
    done = ask(policy, prompts, max_tokens=20)
    scored = policy.score(Jagged.from_rows(prompts, torch.int32), done.tokens)
    assert float((scored.logprobs.values - done.logprobs.values).abs().mean()) < 0.1


def test_waves_hold_every_row_once_within_the_limits():
    tokens = Jagged.from_rows([[1, 2], [3], [1, 2], [4, 5, 6], [3], [9] * 50], torch.int32)
    cut = list(waves(tokens, torch.tensor([4, 4, 4, 0, 4, 4]), max_rows=3, max_tokens=18))
    assert [w.rows.tolist() for w in cut] == [
        [1, 4, 0],
        [2],
        [5],
    ]  # 3 · (2 + 4) = 18; the last one alone exceeds the limit
    assert [[w.prompts.row(g).tolist() for g in w.group] for w in cut] == [[[3], [3], [1, 2]], [[1, 2]], [[9] * 50]]
    assert [len(w.prompts) for w in cut] == [2, 1, 1]


def test_compaction_moves_only_rows_from_the_end():
    finished = torch.tensor([0, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
    assert _compacted(finished.numpy()).tolist() == [0, 4, 2, 5]
