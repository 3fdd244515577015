"""Thoughts as segments."""

import torch

from components.rollouts.segments import close_segments
from components.segmenter.thought import Thoughts
from components.text.stops import ends_of_stop, token_texts
from pipeline.core.jagged import Jagged


def _node(toolbox):
    node = toolbox.start(Thoughts)
    node.tokenizer = toolbox.tokenizer()
    return node


def test_ends_come_from_the_engine_and_the_last_is_the_length(toolbox):
    trajectories = toolbox.trajectories(["a</thought>b</thought>", "a</thought>bc", "abc", ""])
    node = _node(toolbox)
    segments = node.run(trajectories=trajectories).segments
    assert segments.ends.to_lists() == [[11, 22], [11, 13], [3], []]
    assert segments.ends.values.dtype == torch.int32
    assert segments.uid.tolist() == trajectories.uid.tolist()
    assert node.context.metrics == {"segments": 1.25, "searched_share": 0}


def test_plain_responses_are_searched_for_the_stop_string(toolbox):
    trajectories = toolbox.trajectories(
        ["a</thought>b</thought>cd", "abc", ""], thought_ends=Jagged.from_rows([[], [], []], torch.int32)
    )
    node = _node(toolbox)
    assert node.run(trajectories=trajectories).segments.ends.to_lists() == [[11, 22, 24], [3], []]
    assert node.context.metrics["searched_share"] == 1 / 3


def test_no_rows(toolbox):
    assert len(_node(toolbox).run(trajectories=toolbox.trajectories([])).segments) == 0


def test_ends_are_made_valid():
    ends = Jagged.from_rows([[2, 2, 9], [0, 1], [], [3, 1]], torch.int32)
    assert close_segments(ends, torch.tensor([4, 1, 0, 3])).to_lists() == [[2, 4], [1], [], [1, 3]]


def test_stop_strings_over_several_tokens_and_within_one():
    assert ends_of_stop(["x", "<", "/thought", "> y", "z"], "</thought>") == [4]
    assert ends_of_stop(["a</thought>b</thought>", "c</thought>"], "</thought>") == [1, 1, 2]
    assert ends_of_stop([], "</thought>") == []


def test_pieces_are_one_string_per_token(toolbox):
    tokens = Jagged.from_rows([[97, 98, 97], [], [99]], torch.int32)
    assert token_texts(toolbox.tokenizer(), tokens) == [["a", "b", "a"], [], ["c"]]
    assert token_texts(toolbox.tokenizer(), tokens.select(torch.tensor([1]))) == [[]]
