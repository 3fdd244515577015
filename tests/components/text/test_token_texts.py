"""The text of each token, and where stop strings end."""

import torch

from creditgraph.components.text.stops import ends_of_stop, token_texts
from creditgraph.pipeline.core.jagged import Jagged


def test_stop_strings_over_several_tokens_and_within_one():
    assert ends_of_stop(["x", "<", "/thought", "> y", "z"], "</thought>") == [4]
    assert ends_of_stop(["a</thought>b</thought>", "c</thought>"], "</thought>") == [1, 1, 2]
    assert ends_of_stop([], "</thought>") == []


def test_pieces_are_one_string_per_token(toolbox):
    tokens = Jagged.from_rows([[97, 98, 97], [], [99]], torch.int32)
    assert token_texts(toolbox.tokenizer(), tokens) == [["a", "b", "a"], [], ["c"]]
    assert token_texts(toolbox.tokenizer(), tokens.select(torch.tensor([1]))) == [[]]
