"""Toy components: `use: graph_toys:Sampler` works in every test of this folder."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "toys"))

SRPO: dict[str, Any] = {
    "prompts": {"use": "graph_toys:Source"},
    "engine": {"use": "graph_toys:Engine", "in": {"weights": "learner.weights@1"}},
    "verifier": {"use": "graph_toys:Exact"},
    "sampler": {
        "use": "graph_toys:Sampler",
        "in": {"prompts": "prompts.batch", "policy": "engine.policy", "verifier": "verifier.verifier"},
    },
    "localizer": {
        "use": "graph_toys:Localizer",
        "in": {"prompts": "prompts.batch", "failures": "sampler.failures", "policy": "engine.policy"},
    },
    "expander": {
        "use": "graph_toys:Expander",
        "in": {"failures": "sampler.failures", "errors": "localizer.errors", "policy": "engine.policy"},
    },
    "buffer": {"use": "graph_toys:Merge", "in": {"trajectories": ["sampler.trajectories", "expander.trajectories"]}},
    "rewards": {
        "use": "graph_toys:Outcome",
        "in": {"trajectories": "buffer.trajectories", "prompts": "prompts.batch", "verifier": "verifier.verifier"},
    },
    "advantage": {
        "use": "graph_toys:Advantage",
        "in": {"trajectories": "buffer.trajectories", "rewards": "rewards.rewards"},
    },
    "learner": {
        "use": "graph_toys:Learner",
        "in": {"trajectories": "buffer.trajectories", "credit": "advantage.credit"},
    },
    "watch": {"use": "graph_toys:Watch", "in": {"policy": "engine.policy", "errors": "localizer.errors"}},
}


@pytest.fixture
def srpo() -> dict[str, Any]:
    """A fresh description of a sound graph, nodes only: tests break one thing in it."""
    return copy.deepcopy(SRPO)
