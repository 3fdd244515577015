"""Merging populations."""

import pytest
import torch

from creditgraph.components.buffer.merge import Merge
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged


def test_rows_keep_the_order_of_the_wires_and_empty_parts_add_nothing(toolbox):
    first, second = toolbox.trajectories(["a", "bc"]), toolbox.trajectories(["d"], group=[7], first_uid=5000)
    node = toolbox.start(Merge)
    prompts = [toolbox.prompts(["p", "q", "r"]), toolbox.prompts(["r", "s"], first_uid=102)]
    out = node.run(trajectories=[first, toolbox.trajectories([]), second], prompts=prompts)
    merged = out.trajectories
    assert out.prompts.uid.tolist() == [100, 101, 102, 103]
    assert out.prompts.text == ["p", "q", "r", "s"]
    assert merged.text == ["a", "bc", "d"]
    assert merged.uid.tolist() == [1000, 1001, 5000]
    assert merged.response_tokens.equal(Jagged.concat([first.response_tokens, second.response_tokens]))
    assert node.context.metrics == {"trajectories": 3, "groups": 2}


def test_only_empty_parts_give_an_empty_batch(toolbox):
    nothing = [toolbox.trajectories([]), toolbox.trajectories([])]
    none = toolbox.prompts(["p"]).select(torch.zeros(1, dtype=torch.bool))
    out = toolbox.start(Merge).run(trajectories=nothing, prompts=[none])
    assert len(out.trajectories) == len(out.prompts) == 0


def test_a_trajectory_on_two_wires_is_refused(toolbox):
    part = toolbox.trajectories(["a", "b"])
    with pytest.raises(AlignmentError, match="got 2 more than once from part 0, part 1"):
        toolbox.start(Merge).run(trajectories=[part, part], prompts=[toolbox.prompts(["p"])])
