"""A checkpoint from before the first optimizer step can be loaded."""

import copy
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def optimizers() -> Any:
    """megatron-core's module, whose import takes seconds."""
    return pytest.importorskip("megatron.core.optimizer.optimizer")


def saved(optimizers: Any, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """What megatron-core saves of an optimizer: one step for all parameters, left out where it is false."""
    state = copy.deepcopy(optimizer.state_dict())
    step = optimizers.FP32Optimizer._extract_common_per_param_step(state)
    for part in state["state"].values():
        del part["step"]
    if step:
        state["state"]["common_step"] = step
    return state


@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_without_a_step_is_loaded_with_step_0(optimizers: Any, steps: int) -> None:
    from creditgraph.components.learner.megatron.checkpoint import add_first_step

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    zeros = {name: torch.zeros(2) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {**zeros, "step": torch.tensor(float(steps))}
    state = saved(optimizers, optimizer)
    assert ("common_step" in state["state"]) == bool(steps)
    add_first_step({"optimizer": state})
    optimizers.FP32Optimizer._restore_common_per_param_step(state, state["state"].pop("common_step"))
    optimizer.load_state_dict(state)
    assert float(optimizer.state[parameter]["step"]) == steps
