"""Segments of fixed length, at uncertain tokens, and at keywords merged by entropy."""

import pytest
import torch

from creditgraph.components.segmenter.entropy_cuts import EntropyCuts, entropy_ends
from creditgraph.components.segmenter.fixed import Fixed, fixed_ends
from creditgraph.components.segmenter.keyword_entropy import KeywordEntropy, merge_lowest
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.jagged import Jagged


def test_fixed_by_hand():
    assert fixed_ends(torch.tensor([7, 3, 0, 1, 6]), 3).to_lists() == [[3, 6, 7], [3], [], [1], [3, 6]]
    assert fixed_ends(torch.tensor([5]), 100).to_lists() == [[5]]


def test_entropy_cuts_by_hand():
    # The highest entropies after the first token are at places 3 and 1.
    entropies = Jagged.from_rows([[9.0, 2.0, 0.1, 3.0, 0.2], [1.0], [], [1.0, 1.0, 1.0]], torch.float32)
    assert entropy_ends(entropies, 3).to_lists() == [[1, 3, 5], [1], [], [1, 2, 3]]
    assert entropy_ends(entropies, 2).to_lists() == [[3, 5], [1], [], [1, 3]]
    assert entropy_ends(entropies, 1).to_lists() == [[5], [1], [], [3]]


def test_entropy_cuts_slow_version(reference):
    torch.manual_seed(1)
    rows = [(torch.rand(n) * 4).round() / 4 for n in torch.randint(0, 30, (50,)).tolist()]
    for segments in (1, 2, 5, 40):
        fast = entropy_ends(Jagged.from_rows(rows, torch.float32), segments).to_lists()
        assert fast == [reference.entropy_ends(row.tolist(), segments) for row in rows]


def test_merging_by_hand():
    # Sums 5, 1, 2, 4: pairs 6, 3, 6 → join the middle two; then sums 5, 3, 4: pairs 8, 7 → join the last two.
    entropies = [5.0, 1.0, 1.0, 1.0, 4.0]
    assert merge_lowest([1, 2, 4, 5], entropies, 4) == [1, 2, 4, 5]
    assert merge_lowest([1, 2, 4, 5], entropies, 3) == [1, 4, 5]
    assert merge_lowest([1, 2, 4, 5], entropies, 2) == [1, 5]
    assert merge_lowest([1, 2, 4, 5], entropies, 1) == [5]
    assert merge_lowest([], [], 3) == []


def test_merging_slow_version(reference):
    torch.manual_seed(2)
    for _ in range(60):
        count = int(torch.randint(1, 20, (1,)))
        ends = torch.randint(1, 4, (count,)).cumsum(0).tolist()
        entropies = torch.randint(0, 64, (ends[-1],)).div(16).tolist()
        for segments in (1, 3, 8):
            assert merge_lowest(ends, entropies, segments) == reference.merge_lowest(ends, entropies, segments)


@pytest.mark.parametrize(
    ("kind", "settings"), [(Fixed, {"tokens": 4}), (EntropyCuts, {"segments": 3}), (KeywordEntropy, {"segments": 2})]
)
def test_every_segmenter_covers_every_response(toolbox, kind, settings):
    node = toolbox.start(kind, **settings)
    node.tokenizer = toolbox.tokenizer()
    trajectories = toolbox.trajectories(["ab</thought>c\nd</thought>efg", "", "x", "no keyword at all", "\n\n\n"])
    segments = node.run(trajectories=trajectories).segments
    lengths = trajectories.response_tokens.lengths.tolist()
    for row, length in zip(segments.ends.to_lists(), lengths, strict=True):
        assert row == sorted(set(row))
        assert (row[-1:] or [0]) == [length]
        assert 0 not in row
    assert segments.ends.values.dtype == torch.int32
    assert len(node.run(trajectories=toolbox.trajectories([])).segments) == 0
    assert node.context.metrics["segments"] == 0


@pytest.mark.parametrize("kind", [EntropyCuts, KeywordEntropy])
def test_unknown_entropies_are_reported(toolbox, kind):
    trajectories = toolbox.trajectories(["abcd"])
    entropies = trajectories.entropies.with_values(torch.tensor([0.1, float("nan"), 0.2, 0.3]))
    node = toolbox.start(kind)
    node.tokenizer = toolbox.tokenizer()
    with pytest.raises(
        CreditgraphError, match=r"segmenter\.\w+: the engine gave no entropy for 1 of 4 tokens; expected all of them"
    ):
        node.run(trajectories=trajectories.replace(entropies=entropies))


def test_keywords_cut_after_the_token_that_completes_them(toolbox):
    node = toolbox.start(KeywordEntropy, segments=9)
    node.tokenizer = toolbox.tokenizer()
    segments = node.run(trajectories=toolbox.trajectories(["ab</thought>c\nd"])).segments
    assert segments.ends.to_lists() == [[12, 14, 15]]


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (Fixed, {"tokens": 0}, "expected tokens ≥ 1, got 0"),
        (KeywordEntropy, {"keywords": ("",)}, "expected one or more non-empty keywords"),
    ],
)
def test_impossible_settings_are_reported(kind, settings, text):
    with pytest.raises(ValueError, match=text):
        kind.Config(**settings)
