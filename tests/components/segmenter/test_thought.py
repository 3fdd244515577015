"""Thoughts as segments."""

import torch

from creditgraph.components.segmenter.thought import Thoughts
from creditgraph.pipeline.core.jagged import Jagged


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
