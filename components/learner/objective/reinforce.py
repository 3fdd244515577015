"""`reinforce`: the plain policy gradient."""

from torch import Tensor

from creditgraph.components.learner.objective.base import LossInputs, Objective
from creditgraph.components.learner.objective.meters import Meters


class Reinforce(Objective):
    """−A_t log π_θ(y_t): no ratio and no clip. On-policy its gradient equals that of `ppo_clip`.

    Off-policy it is not corrected. Source: RRPO and SRPO (2605.25507).
    """

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss per token."""
        return -inputs.advantage.values * inputs.logprobs.values
