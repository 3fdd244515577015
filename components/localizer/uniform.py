"""Random resets: a uniformly drawn step (RRPO)."""

from creditgraph.components.localizer.base import Localizer, Outputs
from creditgraph.components.rollouts.thoughts import num_thoughts
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.payloads import Prompts, Trajectories
from creditgraph.pipeline.core.streams import keys_within


class UniformLocalizer(Localizer):
    """Draws the step of each failure from Uniform{1 … K}, K being its number of thoughts, without a model call."""

    paper = "2605.25507"

    def run(self, *, failures: Trajectories, prompts: Prompts | None = None, policy: Policy | None = None) -> Outputs:
        """Draws one step per failure, keyed by its prompt and its place among the failures of that prompt."""
        step = 1 + self.context.rng().integers(keys_within(failures.prompt_uid), 0, num_thoughts(failures))
        return self.outputs(failures, step, ["uniform"] * len(failures))
