"""Merging populations."""

import pytest

from components.buffer.merge import Merge
from pipeline.core.errors import AlignmentError
from pipeline.core.jagged import Jagged


def test_rows_keep_the_order_of_the_wires_and_empty_parts_add_nothing(toolbox):
    first, second = toolbox.trajectories(["a", "bc"]), toolbox.trajectories(["d"], group=[7], first_uid=5000)
    node = toolbox.start(Merge)
    merged = node.run(trajectories=[first, toolbox.trajectories([]), second]).trajectories
    assert merged.text == ["a", "bc", "d"]
    assert merged.uid.tolist() == [1000, 1001, 5000]
    assert merged.response_tokens.equal(Jagged.concat([first.response_tokens, second.response_tokens]))
    assert node.context.metrics == {"trajectories": 3, "groups": 2}


def test_only_empty_parts_give_an_empty_batch(toolbox):
    assert (
        len(toolbox.start(Merge).run(trajectories=[toolbox.trajectories([]), toolbox.trajectories([])]).trajectories)
        == 0
    )


def test_a_trajectory_on_two_wires_is_refused(toolbox):
    part = toolbox.trajectories(["a", "b"])
    with pytest.raises(AlignmentError, match="got 2 more than once from part 0, part 1"):
        toolbox.start(Merge).run(trajectories=[part, part])
