"""Exit texts and the end of responses, the fixed bank of solutions, and products too small for a float32."""

import logging
import math

import pytest
import torch

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.redistribute import Redistribute
from creditgraph.components.value.answer_likelihood import AnswerLikelihood
from creditgraph.components.value.bank import AnswerSettings, References, answer_bank, references_of, solution_bank
from creditgraph.components.value.boundaries import boundaries_of
from creditgraph.components.value.gradient_attribution import GradientAttribution
from creditgraph.components.value.leave_one_out import LeaveOneOut
from creditgraph.components.value.states import states_of
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments

EXIT = {"exit_text": "</think>\n\nE", "answer_end": "}"}
CLOSED = "<think>a</think>\nb<|im_end|>"


class PieceTokenizer:
    """Like the table policy's, but tags and the end of a turn are one token each."""

    PIECES = {chr(60000): "<think>", chr(60001): "</think>", chr(60002): "<|im_end|>"}

    def __call__(self, text, **_):
        ids, offsets, at = [], [], 0
        while at < len(text):
            token, piece = next(((c, p) for c, p in self.PIECES.items() if text.startswith(p, at)), (text[at],) * 2)
            ids.append(ord(token))
            offsets.append((at, at + len(piece)))
            at += len(piece)
        return {"input_ids": ids, "offset_mapping": offsets}

    def batch_decode(self, rows, **_):
        return ["".join(self.PIECES.get(chr(i), chr(i)) for i in row) for row in rows]


@pytest.fixture
def policy(table):
    class Tagged(table):
        def __init__(self):
            super().__init__("ab7}E\n" + "".join(PieceTokenizer.PIECES))
            self.tokenizer = PieceTokenizer()
            self.contexts = []

        def score(self, context, tokens, temperature=1.0):
            both = context.join(tokens).to_lists()
            self.contexts += self.tokenizer.batch_decode(both)
            return super().score(context, tokens, temperature)

    return Tagged()


def _rows(toolbox, texts, cuts, **changes):
    """Trajectories of the tokens of `texts`, and segments."""
    tokens = [PieceTokenizer()(text)["input_ids"] for text in texts]
    trajectories = toolbox.trajectories(["".join(map(chr, row)) for row in tokens], **changes).replace(text=texts)
    return trajectories, Segments(uid=trajectories.uid, ends=Jagged.from_rows(cuts, torch.int32))


def test_the_exit_text_depends_on_the_state_and_nothing_follows_the_end(toolbox, policy):
    # Tokens: <think> a </think> \n b <|im_end|>; the second response ends within its thoughts.
    trajectories, segments = _rows(toolbox, [CLOSED, "<think>ab"], [[2, 3, 4, 5, 6], [2, 3]])
    inputs = {"prompts": toolbox.prompts(["P"], answers=["7"]), "trajectories": trajectories, "segments": segments}
    values = toolbox.start(AnswerLikelihood, **EXIT).run(policy=policy, **inputs).values
    assert sorted(set(policy.contexts)) == sorted(
        [
            "P</think>\n\nE7}",
            "P<think>a</think>\n\nE7}",
            "P<think>a</think>\nE7}",
            "P<think>a</think>\nb\n\nE7}",
            "P<think>ab</think>\n\nE7}",
        ]
    )
    # One boundary within a thought and the one that ends it are the same sequence, as are b and its end of turn.
    first = values.values.row(0).tolist()
    assert first[1] == first[2]
    assert first[4] == first[5]
    assert len(set(first)) == 4


@pytest.mark.parametrize("kind", [LeaveOneOut, GradientAttribution])
def test_attributions_ask_before_the_end_of_the_response(toolbox, policy, kind):
    trajectories, segments = _rows(toolbox, [CLOSED], [[3, 5, 6]])
    seen = []

    def attribute(context, tokens, temperature):
        seen.extend(policy.tokenizer.batch_decode(context.join(tokens).to_lists()))
        return context.with_values(torch.ones(len(context.values)))

    policy.attribute = attribute
    inputs = {"prompts": toolbox.prompts(["P"], answers=["7"]), "trajectories": trajectories, "segments": segments}
    values = toolbox.start(kind, **EXIT).run(policy=policy, **inputs).values.values.to_lists()[0]
    texts = seen or policy.contexts
    assert texts[0] == "P<think>a</think>\nb\n\nE7}"
    assert not any("<|im_end|>" in text for text in texts)
    if kind is LeaveOneOut:
        # Without the segment that closes thinking, the exit text closes it; the last segment is only the end of turn.
        assert texts[1:] == ["P\nb</think>\n\nE7}", "P<think>a</think>\n\nE7}", "P<think>a</think>\nb\n\nE7}"]
        assert values[3] - values[2] == pytest.approx(0.0)


def _solved(toolbox):
    prompts = toolbox.prompts(["P", "Q"], answers=["7", ""]).replace(solution=["ba7", ""])
    texts = ["abb", "a\n", "ab", r"b\boxed{7}<|im_end|>", r"\boxed{a}", "bb"]
    cuts = [[1, 3], [1, 2], [2], [1, 10, 11], [9], [1, 2]]
    trajectories, segments = _rows(toolbox, texts, cuts, prompt_uid=torch.tensor([100] * 3 + [101] * 3))
    rewards = toolbox.rewards(trajectories.uid, [1, 0, 1, 1, 2, 0])
    return {"prompts": prompts, "trajectories": trajectories, "segments": segments, "rewards": rewards}


@pytest.mark.parametrize("normalise", [False, True])
def test_fixed_bank_slow_version(toolbox, policy, reference, normalise):
    inputs = _solved(toolbox)
    settings = {"exit_text": "E", "answer_end": "}", "solution_lead": "\n", "length_normalise": normalise}
    policy.alphabet += "\\boxed{"
    node = toolbox.start(AnswerLikelihood, value="solution", **settings)
    values = node.run(policy=policy, **inputs).values
    group = [(r"b\boxed{7}", "7", 1.0), (r"\boxed{a}", "a", 2.0)]
    for i, bounds in enumerate([[0, 1, 3], [0, 1, 2], [0, 2], [0, 1, 10, 10], [0, 9], [0, 1, 2]]):
        response = inputs["trajectories"].text[i].removesuffix("<|im_end|>")
        bank = [("ba7", "7", 1.0)] if i < 3 else group
        slow = reference.solution_values(policy.probability, "P", response, bounds, bank, **settings)
        assert values.values.row(i).tolist() == pytest.approx(slow, rel=1e-5)
        assert values.logs.row(i).tolist() == pytest.approx([math.log(v) for v in slow], rel=1e-6)
    assert node.context.metrics["empty_bank_share"] == 0.0


def test_where_the_references_of_a_fixed_bank_come_from(toolbox, policy):
    inputs = _solved(toolbox)
    bounds = boundaries_of(inputs["trajectories"], inputs["segments"])

    def texts(**changes):
        settings = AnswerSettings(exit_text="E", **changes)
        references: References = references_of(
            inputs["prompts"], inputs["trajectories"], inputs["rewards"], settings, solutions=True
        )
        return [[(r.solution, r.answer) for r in row] for row in references[::3]], references

    group = [(r"b\boxed{7}", "7"), (r"\boxed{a}", "a")]
    assert texts()[0] == [[("ba7", "7")], group]
    assert texts(references=1)[0] == [[("ba7", "7")], group[:1]]
    assert texts(bank="reference")[0] == [[("ba7", "7")], []]
    assert texts(bank="group")[0] == [[], group]
    # All states of a trajectory have the same references, which differ only in what leads to them.
    rows = torch.zeros(3, dtype=torch.int64)
    at = torch.tensor([1, 2, 3])
    states = states_of(policy.tokenizer, bounds, rows + 1, at, torch.full_like(at, 9))
    settings = AnswerSettings(exit_text="</think>E", solution_lead="--")
    bank = solution_bank(policy.tokenizer, texts()[1], states, settings)
    decoded = policy.tokenizer.batch_decode(bank.tokens.to_lists())
    assert [[decoded[e] for e in row] for row in bank.entries.to_lists()] == [
        ["--ba7</think>E7}"],
        ["--ba7</think>E7}"],
        ["ba7</think>E7}"],  # the response so far ends with a line break
    ]
    flags = bank.scored.row(int(bank.entries.values[0])).tolist()
    assert flags == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    answers = answer_bank(policy.tokenizer, texts()[1], states, settings)
    assert policy.tokenizer.batch_decode(answers.tokens.to_lists()) == ["</think>E7}"]


def test_products_that_underflow_are_reported_and_still_share_the_credit(toolbox, table, caplog):
    prompts = toolbox.prompts(["P"], answers=["7"]).replace(solution=["ab" * 150])
    trajectories = toolbox.trajectories(["abab", "abba", "babb"])
    segments = Segments(uid=trajectories.uid, ends=Jagged.from_rows([[1, 2, 3, 4]] * 3, torch.int32))
    rewards = toolbox.rewards(trajectories.uid, [1, 0, 0])
    inputs = {"trajectories": trajectories, "segments": segments, "rewards": rewards}
    node = toolbox.start(
        AnswerLikelihood, value="solution", exit_text="E", answer_end="}", solution_lead="E", length_normalise=False
    )
    policy = table("ab7}E")
    with caplog.at_level(logging.WARNING, logger="creditgraph"):
        values = node.run(prompts=prompts, policy=policy, **inputs).values
        node.run(prompts=prompts, policy=policy, **inputs)
    assert [r.getMessage() for r in caplog.records] == [
        "node 'answerlikelihood': 15 of 15 values are products of probabilities below 1e-45, and 0 as a float32. "
        "advantage.redistribute counts them by their logs, other advantages as 0. Set length_normalise: true, or take "
        "fewer tokens per reference."
    ]
    assert node.context.metrics["underflow"] == 15
    assert not values.values.values.any()
    credit = toolbox.start(GroupAdvantage).run(trajectories=trajectories, rewards=rewards).credit
    advantage = toolbox.start(Redistribute)
    out = advantage.run(values=values, credit=credit, **inputs).credit
    assert advantage.context.metrics["uniform_share"] == 0.0
    assert not torch.allclose(out.advantage.values, credit.advantage.values, atol=0.1)
    short = toolbox.start(AnswerLikelihood, exit_text="E", answer_end="}")
    short.run(prompts=prompts, policy=policy, **inputs)
    assert short.context.metrics["underflow"] == 0
