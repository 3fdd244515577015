"""For tests of a plug-in: a batch as `creditgraph check` gives it to a component."""

from __future__ import annotations

from creditgraph.pipeline.app.notebook.session import Composition, StepOutputs
from creditgraph.pipeline.app.trial import SMALL


def batch(recipe: str = "toy_grpo", *overrides: str) -> StepOutputs:
    """What the nodes of an embedded recipe return for a few rollouts of the embedded model, learners left out.

        out = creditgraph.testing.batch()
        credit = MyAdvantage().run(trajectories=out["sampler.trajectories"], rewards=out["rewards.rewards"]).credit

    It takes a second or two, needs the extra 'train', and is the same on every call. `recipe="toy_srpo"` has failures,
    errors and suffixes, "toy_vineppo" segments and values, "toy_gigpo_thoughts" turns.

    Args:
        recipe: the recipe; two prompts with its group size.
        overrides: further settings, such as "prompts.batch=4".
    """
    with Composition([f"recipe={recipe}", *SMALL, *overrides]).session() as session:
        return session.step(learn=False)
