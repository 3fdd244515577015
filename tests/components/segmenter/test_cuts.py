"""Entropy cuts with a quantile; fixed segments at their limits."""

import pytest
import torch

from creditgraph.components.segmenter.entropy_cuts import EntropyCuts, entropy_ends
from creditgraph.components.segmenter.fixed import Fixed, fixed_ends
from creditgraph.pipeline.core.jagged import Jagged

#          place  0    1    2    3    4    5    6    7
ENTROPIES = [[9.0, 2.0, 0.1, 3.0, 2.9, 0.2, 2.5, 2.8]]


def _ends(segments, quantile=0.0):
    return entropy_ends(Jagged.from_rows(ENTROPIES, torch.float32), segments, quantile).to_lists()[0]


def test_cuts_by_hand():
    # Order: 3 (3.0), 4 (2.9), 7 (2.8), 6 (2.5), 1 (2.0), 5, 2.
    assert _ends(4) == [3, 4, 7, 8]


def test_quantile_by_hand():
    # The top quarter of 8 tokens is 2: places 3 and 4; the first token takes no cut and no place among them.
    assert _ends(8, quantile=0.75) == [3, 4, 8]
    # A number that binds first.
    assert _ends(2, quantile=0.75) == [3, 8]
    # Rounded up: one token of eight at least.
    assert _ends(8, quantile=0.99) == [3, 8]


def test_slow_version(reference):
    torch.manual_seed(3)
    rows = [(torch.rand(n) * 8).round() / 8 for n in torch.randint(0, 25, (40,)).tolist()]
    jagged = Jagged.from_rows(rows, torch.float32)
    for segments in (1, 3, 50):
        for quantile in (0.0, 0.5, 0.8):
            fast = entropy_ends(jagged, segments, quantile).to_lists()
            assert fast == [reference.entropy_cuts(row.tolist(), segments, quantile) for row in rows]


def test_no_limits_is_one_segment_per_token():
    jagged = Jagged.from_rows([[0.3, 0.1, 0.2], []], torch.float32)
    assert entropy_ends(jagged, 99).to_lists() == [[1, 2, 3], []]


def test_fixed_segments_are_those_of_a_plain_loop():
    for tokens in (1, 3, 64):
        lengths = [*range(9), 63, 64, 65, 128]
        slow = [sorted({min(t + tokens, n) for t in range(0, n, tokens)}) for n in lengths]
        assert fixed_ends(torch.tensor(lengths), tokens).to_lists() == slow


def test_long_fixed_segments_are_whole_responses(toolbox):
    trajectories = toolbox.trajectories(["abc", "", "defgh"])
    segments = toolbox.start(Fixed, tokens=100).run(trajectories=trajectories).segments
    assert segments.ends.to_lists() == [[3], [], [5]]
    assert segments.uid.tolist() == trajectories.uid.tolist()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quantile": 1.0}, "expected 0 ≤ quantile < 1, got 1.0"),
        ({"quantile": -0.1}, "expected 0 ≤ quantile < 1, got -0.1"),
        ({"segments": 0}, "expected segments ≥ 1, got 0"),
    ],
)
def test_impossible_settings_are_reported(settings, text):
    with pytest.raises(ValueError, match=text):
        EntropyCuts.Config(**settings)
