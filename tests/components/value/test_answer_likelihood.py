"""Answer likelihood: banks, scoring and pooling by hand, slow loops, bias, identities, bad input."""

import math
from itertools import product

import pytest
import torch

import creditgraph.testing
from creditgraph.components.advantage.additive import AdditiveAdvantage
from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.redistribute import Redistribute
from creditgraph.components.value.answer_likelihood import AnswerLikelihood, carried
from creditgraph.components.value.bank import (
    AnswerSettings,
    answer_bank,
    continuation_bank,
    encode_parts,
    references_of,
)
from creditgraph.components.value.boundaries import boundaries_of, branch_tokens, shared_sequences
from creditgraph.components.value.estimator import log_pooled, log_probability
from creditgraph.components.value.states import states_of
from creditgraph.pipeline.core.errors import AlignmentError, ConfigError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments

EXIT = {"exit_text": "E", "answer_end": "}"}


def _segments(trajectories, rows):
    return Segments(uid=trajectories.uid, ends=Jagged.from_rows(rows, torch.int32))


def _each_token(toolbox, texts, **changes):
    """Trajectories in which every token is a thought, and segments of one token."""
    trajectories = toolbox.trajectories(texts, **changes)
    ends = [list(range(1, len(t) + 1)) for t in texts]
    trajectories = trajectories.replace(thought_ends=Jagged.from_rows(ends, torch.int32))
    return trajectories, _segments(trajectories, ends)


def _answers(tokenizer, prompts, trajectories, bounds, rewards, settings):
    """The bank of answers at every boundary."""
    states = states_of(tokenizer, bounds, bounds.owner, bounds.at, bounds.trunk.lengths[bounds.owner])
    references = references_of(prompts, trajectories, rewards, settings, solutions=False)
    return answer_bank(tokenizer, references, states, settings)


def test_answer_tokens_by_hand(table):
    def parts(answer):
        return [("E:", "given"), (answer, "scored"), ("}", "closing")]

    tokenizer = table().tokenizer
    assert encode_parts(tokenizer, parts("12")) == ([69, 58, 49, 50, 125], [False, False, True, True, True])
    assert encode_parts(tokenizer, parts("")) == ([], [])

    def pieces(text, **_):
        return {"input_ids": [1, 2, 3], "offset_mapping": [(0, 1), (1, 4), (4, 5)]}

    # A token that holds the end of the exit text and the answer counts as answer.
    assert encode_parts(pieces, parts("12")) == ([1, 2, 3], [False, True, True])

    # A vocabulary without the answer's words: only exit text and end are left.
    def without(text, **_):
        return {"input_ids": [1, 3], "offset_mapping": [(0, 2), (4, 5)]}

    assert encode_parts(without, parts("12")) == ([], [])


def test_bank_from_references_and_from_correct_trajectories(toolbox, table):
    prompts = toolbox.prompts(["p", "q"], answers=["7", ""])
    texts = ["x", r"\boxed{2}", r"\boxed{9}", r"\boxed{2} ", r"\boxed{4}", r"\boxed{5}", "no answer"]
    trajectories = toolbox.trajectories(texts, prompt_uid=torch.tensor([100, *[101] * 6]))
    rewards = toolbox.rewards(
        trajectories.uid, [0, 1, 0, 1, 2, 1, 1], valid=[True, True, True, True, True, False, True]
    )
    bounds = boundaries_of(trajectories, _segments(trajectories, [[len(t)] for t in texts]))

    def bank(given=rewards, **settings):
        result = _answers(table().tokenizer, prompts, trajectories, bounds, given, AnswerSettings(**EXIT, **settings))
        texts = ["".join(map(chr, row)) for row in result.tokens.to_lists()]
        rows = [[texts[e] for e in row] for row in result.entries.to_lists()]
        assert rows[::2] == rows[1::2]  # the start and the end of each response
        return rows[::2], result

    rows, result = bank()
    # The second problem has no reference: distinct answers of its correct, valid trajectories, in order.
    assert rows == [["E7}"]] + [["E2}", "E4}"]] * 6
    assert result.reward.tolist() == [1.0] * 2 + [1.0, 2.0] * 12
    assert result.scored.to_lists() == [[False, True, True]] * 3
    assert bank(references=1)[0][1] == ["E2}"]
    assert bank(bank="reference")[0] == [["E7}"]] + [[]] * 6
    assert bank(bank="group")[0] == [[]] + [["E2}", "E4}"]] * 6
    assert bank(given=None)[0] == [["E7}"]] + [[]] * 6


def test_continuations_by_hand(toolbox):
    trajectories, segments = _each_token(toolbox, ["abc", "abd", "xbc", "ab", "q"])
    rewards = toolbox.rewards(trajectories.uid, [1, 0, 1, 0, 0])
    trajectories = trajectories.replace(prompt_uid=torch.tensor([100] * 4 + [101]))
    bounds = boundaries_of(trajectories, segments, rewards)
    bank = continuation_bank(trajectories, rewards, bounds.place, 4)
    texts = ["".join(map(chr, row)) for row in bank.tokens.to_lists()]
    result = [[texts[e] for e in row] for row in bank.entries.to_lists()]
    # After 0 thoughts both correct responses, after 1 the same rest of both, nothing at an end; the last problem has
    # none.
    own = [["abc", "xbc"], ["bc"], ["c"], []]
    assert result == own * 3 + [["abc", "xbc"], ["bc"], []] + [[], []]
    assert continuation_bank(trajectories, rewards, bounds.place, 1).entries.lengths.max() == 1


def test_pooling_by_hand():
    logprobs = Jagged.from_rows([[-9.0, -1.0, -3.0], [-2.0]], torch.float32)
    tails = Jagged.from_rows([[True, True], [True]], torch.bool)
    assert log_probability(logprobs, tails, False).tolist() == [-4, -2]
    assert log_probability(logprobs, tails, True).tolist() == [-2, -2]
    gaps = Jagged.from_rows([[True, False, True], [True]], torch.bool)
    assert log_probability(logprobs, gaps, False).tolist() == [-12, -2]
    p, reward, place = (
        torch.tensor([0.5, 0.25, 0.5, 0.5]).double(),
        torch.tensor([1.0, 1.0, 0.5, -1.0]).double(),
        torch.tensor([0, 0, 2, 2]),
    )
    assert log_pooled(p.log(), reward, place, 3, False).exp().tolist() == pytest.approx([0.75, 0.0, 0.25])
    assert log_pooled(p.log(), reward, place, 3, True).exp().tolist() == pytest.approx([0.375, 0.0, 0.125])
    small = log_pooled(p.log() - 9000.0, reward, place, 3, False).tolist()
    assert small == pytest.approx([math.log(0.75) - 9000, -math.inf, math.log(0.25) - 9000])
    rows = Jagged.from_rows([[0, 0, 0], [0, 0], [0, 0, 0]], torch.int64)
    known = torch.tensor([True, True, False, False, False, True, False, True])
    values = torch.tensor([0.25, 0.5, 9.0, 9.0, 9.0, 0.125, 9.0, 1.0]).double()
    none = -math.inf
    assert carried(values, known, rows).tolist() == [0.25, 0.5, 0.5, none, none, 0.125, 0.125, 1.0]


def test_equal_sequences_are_scored_once():
    trunk = Jagged.from_rows([[1, 2, 3], [1, 2, 4]], torch.int32)
    # 1|23, 12|3 and the other trunk's 1|23 are one sequence; 12|4 is another.
    row, at = torch.tensor([0, 0, 1, 1]), torch.tensor([2, 1, 1, 2])
    tokens = Jagged.from_rows([[3], [2, 3], [2, 3], [4]], torch.int32)
    once, member = shared_sequences(trunk, row, at, tokens)
    assert once.tolist() == [1, 3]
    assert member.tolist() == [0, 0, 0, 1]
    # Trunk 0 as far as 1, trunk 1 as far as 2, and 2 − 1 branch tokens that predict something.
    assert branch_tokens(row[once], at[once], tokens.select(once)) == 1 + 2 + 1


@pytest.mark.parametrize("normalise", [True, False])
def test_immediate_slow_version(toolbox, table, reference, normalise):
    policy, prompts = table("ab1E}2"), toolbox.prompts(["P", "P"], answers=["12", ""])
    texts = ["abba", "a", "", "bab", r"ab", "ba"]
    trajectories = toolbox.trajectories(texts, prompt_uid=torch.tensor([100, 100, 100, 101, 101, 101]))
    segments = _segments(trajectories, [[1, 3, 4], [1], [], [2, 3], [2], [1, 2]])
    node = toolbox.start(AnswerLikelihood, **EXIT, length_normalise=normalise)
    values = node.run(prompts=prompts, trajectories=trajectories, segments=segments, policy=policy).values.values
    for i, text in enumerate(texts):
        answers = [("12", 1.0)] if i < 3 else []
        bounds = [0, *segments.ends.row(i).tolist()]
        slow = reference.immediate_values(policy.probability, "P", text, bounds, "E", answers, "}", normalise)
        assert values.row(i).tolist() == pytest.approx(slow)
    assert node.context.metrics["empty_bank_share"] == 0.5
    assert node.context.metrics["boundaries"] == 15


def _toy(toolbox, draw):
    """Responses of 3 characters, right when they end in b; `draw` picks the sampled ones."""
    texts = [t for t in map("".join, product("ab", repeat=3)) if draw(t)]
    trajectories, segments = _each_token(toolbox, texts)
    rewards = toolbox.rewards(trajectories.uid, [float(t.endswith("b")) for t in texts])
    return texts, {
        "trajectories": trajectories,
        "segments": segments,
        "rewards": rewards,
        "prompts": toolbox.prompts(["P"]),
    }


def test_biased_low_unless_the_bank_covers_every_rewarded_continuation(toolbox, table, reference):
    policy = table()
    node = toolbox.start(AnswerLikelihood, **EXIT, value="continuation", length_normalise=False, references=8)

    def exact(text):
        return [reference.exact_value(policy, "P", text[:k], 3, lambda s: float(s.endswith("b"))) for k in range(4)]

    texts, inputs = _toy(toolbox, lambda t: True)
    full = node.run(policy=policy, **inputs).values.values
    for i, text in enumerate(texts):
        assert full.row(i).tolist() == pytest.approx(exact(text), abs=1e-6)
    gaps = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        texts, inputs = _toy(toolbox, lambda t, g=generator: torch.rand(1, generator=g).item() < 0.5)
        result = node.run(policy=policy, **inputs).values.values
        for i, text in enumerate(texts):
            gaps += [b - a for a, b in zip(result.row(i).tolist(), exact(text), strict=True)]
    assert min(gaps) > -1e-6
    assert sum(gaps) / len(gaps) > 0.05


def test_weights_by_hand(toolbox, table):
    # "ab" and "bb" are right, "aa" is wrong; drawn with q = ¼, ½ and 1 of these tokens each. After nothing, p of "ab"
    # and "bb" are p1 and p2: distinct p1 + p2, mean (p1 + p2)/2, proposal (p1/¼² + p2/½²)/3. After "a", of the drawn
    # rests "b" (q ¼), "b" (q ½) and "a": distinct p, mean p, proposal (p/¼ + p/½)/3.
    policy = table()
    trajectories, segments = _each_token(toolbox, ["ab", "bb", "aa"])
    q = torch.tensor([0.25, 0.25, 0.5, 0.5, 1.0, 1.0])
    trajectories = trajectories.replace(engine_logprobs=trajectories.response_tokens.with_values(q.log()))
    inputs = {
        "trajectories": trajectories,
        "segments": segments,
        "rewards": toolbox.rewards(trajectories.uid, [1.0, 1.0, 0.0]),
        "prompts": toolbox.prompts(["P"]),
    }
    p1, p2, p = (policy.probability(*text) for text in (("P", "ab"), ("P", "bb"), ("Pa", "b")))
    settings = EXIT | {"value": "continuation", "length_normalise": False}
    for weights, first, second in (
        ("distinct", p1 + p2, p),
        ("mean", (p1 + p2) / 2, p),
        ("proposal", (16 * p1 + 4 * p2) / 3, (4 * p + 2 * p) / 3),
    ):
        node = toolbox.start(AnswerLikelihood, weights=weights, **settings)
        assert node.run(policy=policy, **inputs).values.values.row(0).tolist() == pytest.approx([first, second, 1.0])
    # With two draws, a wrong one still counts: the third trajectory is not among them.
    two = toolbox.start(AnswerLikelihood, weights="proposal", references=2, **settings)
    assert float(two.run(policy=policy, **inputs).values.values.row(2)[0]) == pytest.approx((16 * p1 + 4 * p2) / 2)
    with pytest.raises(ValueError, match=r"expected value 'continuation' and length_normalise false with 'proposal'"):
        AnswerLikelihood.Config(weights="proposal")


@pytest.mark.parametrize("covers", [True, False])
def test_proposal_weights_are_unbiased_where_the_draws_cover_what_is_rewarded(toolbox, table, reference, covers):
    # E over all pairs of responses, each drawn with q, of v̂ at each prefix of the first one, against v of the policy.
    # Where q never writes b after an a, what the policy earns with it is missing.
    policy, texts = table(), ["".join(t) for t in product("ab", repeat=3)]

    def drawn(text, k):
        plain = policy.next("P" + text[:k])[text[k]]
        return plain if covers or text[k - 1 : k] != "a" else float(text[k] == "a")

    q = {text: [drawn(text, k) for k in range(3)] for text in texts}
    kept = [t for t in texts if math.prod(q[t]) > 0]
    node = toolbox.start(AnswerLikelihood, **EXIT, value="continuation", length_normalise=False, weights="proposal")
    total, mass = {}, {}
    for pair in product(kept, repeat=2):
        trajectories, segments = _each_token(toolbox, list(pair))
        logs = torch.tensor([q[t] for t in pair]).log().reshape(-1)
        trajectories = trajectories.replace(engine_logprobs=trajectories.response_tokens.with_values(logs))
        rewards = toolbox.rewards(trajectories.uid, [float(t.endswith("b")) for t in pair])
        given = {"trajectories": trajectories, "segments": segments, "rewards": rewards}
        values = node.run(policy=policy, prompts=toolbox.prompts(["P"]), **given).values.values.row(0).tolist()
        weight = math.prod(q[pair[0]]) * math.prod(q[pair[1]])
        for k in range(3):
            total[pair[0][:k]] = total.get(pair[0][:k], 0.0) + weight * values[k]
            mass[pair[0][:k]] = mass.get(pair[0][:k], 0.0) + weight
    gaps = []
    for prefix in total:
        exact = reference.exact_value(policy, "P", prefix, 3, lambda s: float(s.endswith("b")))
        gaps.append(exact - total[prefix] / mass[prefix])
    assert gaps == pytest.approx([0.0] * 7, abs=1e-6) if covers else (min(gaps) > -1e-6 and max(gaps) > 0.1)


def test_immediate_with_all_answers_is_the_value_of_stopping_here(toolbox, table):
    # Answers are one character; right are 1 and 2. The sum over both is P(right | exit).
    policy = table("ab12E}")
    prompts = toolbox.prompts(["P"], answers=[""])
    trajectories = toolbox.trajectories([r"a\boxed{1}", r"b\boxed{2}", "ab"])
    segments = _segments(trajectories, [[len(t)] for t in trajectories.text])
    node = toolbox.start(AnswerLikelihood, **EXIT, length_normalise=False)
    inputs = {"prompts": prompts, "trajectories": trajectories, "segments": segments, "policy": policy}
    both = node.run(**inputs, rewards=toolbox.rewards(trajectories.uid, [1, 1, 0])).values.values
    one = node.run(**inputs, rewards=toolbox.rewards(trajectories.uid, [1, 0, 0])).values.values
    expected = sum(policy.probability("PE", c + "}") for c in "12")
    assert both.row(2).tolist()[0] == pytest.approx(expected)
    assert bool((one.values < both.values).all())


def test_sum_adds_both_and_stays_below_one(toolbox, table):
    policy = table("abE}1")
    _, inputs = _toy(toolbox, lambda t: True)
    parts = {}
    for value in ("immediate", "continuation", "sum"):
        node = toolbox.start(AnswerLikelihood, **EXIT, value=value, length_normalise=False, references=8)
        parts[value] = node.run(policy=policy, **inputs).values.values.values
    torch.testing.assert_close(parts["sum"], (parts["immediate"] + parts["continuation"]).clamp(max=1.0))


def test_an_empty_bank_leaves_the_outcome_credit(toolbox, table):
    prompts = toolbox.prompts(["P"], answers=[""])
    trajectories, segments = _each_token(toolbox, ["ab", "b", "bba", ""])
    rewards = toolbox.rewards(trajectories.uid, [0.5, 0.0, 0.25, 0.0])  # none counts as correct
    node = toolbox.start(AnswerLikelihood, **EXIT)
    values = node.run(
        prompts=prompts, trajectories=trajectories, segments=segments, policy=table("abE}"), rewards=rewards
    ).values
    assert not values.values.values.any()
    assert node.context.metrics["empty_bank_share"] == 1.0
    assert node.context.metrics["scored_tokens"] == 0
    credit = toolbox.start(GroupAdvantage).run(trajectories=trajectories, rewards=rewards).credit
    inputs = {
        "trajectories": trajectories,
        "segments": segments,
        "values": values,
        "rewards": rewards,
        "credit": credit,
    }
    for kind in (Redistribute, AdditiveAdvantage):
        torch.testing.assert_close(toolbox.start(kind).run(**inputs).credit.advantage.values, credit.advantage.values)


def test_states_without_room_keep_the_value_before_them(toolbox, table):
    policy, prompts = table("abE}7"), toolbox.prompts(["P"], answers=["7"])
    trajectories, segments = _each_token(toolbox, ["abab"])
    node = toolbox.start(AnswerLikelihood, **EXIT)
    free = node.run(
        prompts=prompts, trajectories=trajectories, segments=segments, policy=policy
    ).values.values.to_lists()[0]
    node.room = 1 + 2 + 3  # prompt, two response tokens, "E7}"
    tight = node.run(
        prompts=prompts, trajectories=trajectories, segments=segments, policy=policy
    ).values.values.to_lists()[0]
    assert tight == [*free[:3], free[2], free[2]]
    assert node.context.metrics["no_room"] == 2


def test_one_thought_and_a_response_cut_by_budget(toolbox, table):
    policy, prompts = table("abE}7"), toolbox.prompts(["P"], answers=["7"])
    trajectories = toolbox.trajectories(["b", "aa", "ab"], finish_reason=["eos", "length", "eos"])
    ends = Jagged.from_rows([[1], [2], [2]], torch.int32)
    trajectories, segments = trajectories.replace(thought_ends=ends), Segments(uid=trajectories.uid, ends=ends)
    rewards = toolbox.rewards(trajectories.uid, [1, 0, 1])
    node = toolbox.start(AnswerLikelihood, **EXIT, value="continuation", length_normalise=False)
    values = node.run(
        prompts=prompts, trajectories=trajectories, segments=segments, policy=policy, rewards=rewards
    ).values.values
    start = policy.probability("P", "b") + policy.probability("P", "ab")
    assert values.to_lists() == [[pytest.approx(start), end] for end in (1.0, 0.0, 1.0)]


def test_wrong_inputs_are_reported(toolbox, table):
    prompts, (trajectories, segments) = toolbox.prompts(["P"]), _each_token(toolbox, ["ab"])
    inputs = {"prompts": prompts, "trajectories": trajectories, "segments": segments, "policy": table()}
    with pytest.raises(
        ConfigError,
        match=r"value 'continuation' takes continuations .* expected an input 'rewards', .* Wire rewards\.rewards",
    ):
        toolbox.start(AnswerLikelihood, **EXIT, value="continuation").run(**inputs)
    short = {**inputs, "segments": _segments(trajectories, [[1]])}
    with pytest.raises(
        AlignmentError, match="the last segment of trajectory 1000 ends at 1 and its response has 2 tokens"
    ):
        toolbox.start(AnswerLikelihood, **EXIT).run(**short)
    with pytest.raises(ValueError, match="expected references ≥ 1, got 0"):
        AnswerLikelihood.Config(references=0)
    with pytest.raises(ValueError, match="expected a non-empty exit_text and answer_end"):
        AnswerLikelihood.Config(answer_end="")


@pytest.mark.parametrize("value", ["immediate", "continuation"])
def test_embedded_model_equals_scoring_every_boundary_alone(tiny, value):
    from creditgraph.components.rewards.outcome import Outcome
    from creditgraph.components.sampler.chains import Chains
    from creditgraph.components.segmenter.thought import Thoughts
    from creditgraph.components.verifier.exact import Exact

    policy, prompts = tiny.policy, tiny.prompts
    trajectories = (
        tiny.start(Chains, mode="thought", max_tokens=60, group_size=6).run(prompts=prompts, policy=policy).trajectories
    )
    rewards = (
        tiny.start(Outcome)
        .run(verifier=tiny.start(Exact).run().verifier, trajectories=trajectories, prompts=prompts)
        .rewards
    )
    segments = tiny.start(Thoughts).run(trajectories=trajectories).segments
    assert rewards.correct.any()
    node = tiny.start(AnswerLikelihood, value=value, length_normalise=False, exit_text=" \\boxed{ ", answer_end=" }")
    inputs = {"trajectories": trajectories, "segments": segments}
    result = node.run(prompts=prompts, policy=policy, rewards=rewards, **inputs).values.values
    bounds = boundaries_of(trajectories, segments)
    if value == "immediate":
        bank = _answers(policy.tokenizer, prompts, trajectories, bounds, rewards, node.config)
    else:
        bank = continuation_bank(trajectories, rewards, bounds.place, node.config.references)
    at = bounds.at
    if value == "immediate":
        # No answer after the end of a response.
        ended = torch.tensor([text.endswith("<eos>") for text in trajectories.text])
        at = torch.minimum(at, (bounds.trunk.lengths - ended.long())[bounds.owner])
    for b in range(0, len(bounds.owner), 7):
        context = bounds.trunk.row(int(bounds.owner[b]))[: int(at[b])]
        slow = 0.0
        for entry in bank.entries.row(b).tolist():
            scores = policy.score(Jagged.from_rows([context]), Jagged.from_rows([bank.tokens.row(entry)]))
            slow += scores.logprobs.values[bank.scored.row(entry)].sum().exp().item()
        if value == "continuation" and bool(bounds.last[b]):
            slow = float(rewards.correct[int(bounds.owner[b])])
        assert result.values[b].item() == pytest.approx(slow, abs=1e-5)


def test_no_trajectories(toolbox, table):
    none = torch.zeros(0, dtype=torch.int64)
    trajectories, segments = _each_token(toolbox, ["ab"])
    inputs = {"trajectories": trajectories.select(none), "segments": segments.select(none)}
    inputs["rewards"] = toolbox.rewards(trajectories.uid, [1.0]).select(none)
    for value in ("immediate", "sum"):
        node = toolbox.start(AnswerLikelihood, **EXIT, value=value)
        assert len(node.run(prompts=toolbox.prompts(["P"]), policy=table(), **inputs).values) == 0


@pytest.mark.parametrize(
    "recipe",
    ["toy_rredcot", "toy_rredcot_gradient", "toy_rredcot_leave_one_out", "toy_igpo_thoughts", "toy_trace_td_thoughts"],
)
def test_recipes_have_references_in_the_models_vocabulary(recipe):
    out = creditgraph.testing.batch(recipe, *(["value.value=immediate"] if recipe == "toy_rredcot" else []))
    # With an exit text that the vocabulary does not have nothing is scored, and all values before the end are 0.
    values = out["value.values"].values
    assert float(values.values[values.offsets[:-1]].abs().max()) > 0
