"""A sample."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """A response with its reward."""

    group_index: int | None = None
    index: int | None = None
    prompt: str = ""
    response: str = ""
    label: str | None = None
    multimodal_inputs: dict[str, Any] | None = None
    rollout_log_probs: list[float] | None = None
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    reward: Any = None
    loss_mask: list[int] | None = None
    remove_sample: bool = False
    rollout_id: int | None = None

    def get_reward_value(self, args):
        """The reward, or the one of them that a setting names."""
        return self.reward[args.reward_key] if args.reward_key else self.reward
