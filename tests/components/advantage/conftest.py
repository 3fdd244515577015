"""A batch with segments, values and rewards, for the advantages of segments."""

import pytest
import torch

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments, SegmentValues


def random_values(seed=0, rows=40):
    """Random segments, values, rewards; the first two rows are an empty response and one of a single segment."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 7, (rows,), generator=generator)
    counts[0], counts[1] = 0, 1
    sizes = [torch.randint(1, 5, (int(c),), generator=generator) for c in counts]
    ends = Jagged.from_rows([s.cumsum(0) for s in sizes], torch.int32)
    values = Jagged.from_rows([torch.rand(int(c) + 1, generator=generator) for c in counts], torch.float32)
    return sizes, ends, values, torch.randint(0, 2, (rows,), generator=generator).float()


@pytest.fixture(name="random_values")
def random_values_fixture():
    return random_values


@pytest.fixture
def case(toolbox):
    sizes, ends, values, reward = random_values()
    trajectories = toolbox.trajectories(["x" * int(s.sum()) for s in sizes], group=[i // 8 for i in range(40)])
    rewards = toolbox.rewards(trajectories.uid, reward.tolist())
    return {
        "trajectories": trajectories,
        "segments": Segments(uid=trajectories.uid, ends=ends),
        "values": SegmentValues(uid=trajectories.uid, values=values),
        "rewards": rewards,
    }


@pytest.fixture
def with_credit(toolbox):
    def add(case, **settings):
        inputs = {name: case[name] for name in ("trajectories", "rewards")}
        return {**case, "credit": toolbox.start(GroupAdvantage, **settings).run(**inputs).credit}

    return add


@pytest.fixture
def advantage(toolbox):
    """Advantage of a component with these settings, as a function of its inputs."""

    def build(kind, **settings):
        return lambda **given: toolbox.start(kind, **settings).run(**given).credit

    return build
