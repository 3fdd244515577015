"""The methods of the benchmarks, one line each. Any recipe whose learner reads a `Credit` can be one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.run.compose.choices import list_choices, search_dirs
from creditgraph.pipeline.run.compose.experiment import Experiment, build_experiment, compose


@dataclass(frozen=True)
class Method:
    """A recipe with changed settings under a name.

    Attributes:
        name: shown in tables.
        recipe: name in configs/recipe.
        overrides: further settings, as on the command line.
        trained: whether creditgraph compare trains it when no methods are named; the others are estimators that only
            creditbench measures.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    trained: bool = True

    def overridden(self, *more: str) -> list[str]:
        """The command line's overrides for this method."""
        return [f"recipe={self.recipe}", *self.overrides, *more]

    def experiment(self, *more: str, config_dirs: Sequence[str | Path] = ()) -> Experiment:
        """The checked configuration."""
        return build_experiment(compose(self.overridden(*more), config_dirs), self.name)


BASELINE = Method("grpo", "toy_grpo")

# In the order of tables: outcome credit, ratio objectives, resets, segment values, trees, second attempts.
METHODS: tuple[Method, ...] = (
    BASELINE,
    Method("drgrpo", "toy_drgrpo"),
    Method("dapo", "toy_dapo"),
    # The ratio objectives take four steps per rollout batch, and so does this baseline.
    Method("grpo_4_steps", "toy_grpo", ("learner.minibatches=4",)),
    Method("gspo", "toy_gspo"),
    Method("grpo_lambda", "toy_grpo_lambda"),
    Method("grpo_lambda_both", "toy_grpo_lambda_both"),
    Method("p_trace", "toy_p_trace"),
    Method("s_trace", "toy_s_trace"),
    Method("entropy_8020", "toy_entropy_8020"),
    Method("rrpo", "toy_rrpo"),
    Method("srpo", "toy_srpo"),
    Method("srpo_oracle", "toy_srpo_oracle"),
    Method("rredcot", "toy_rredcot"),
    Method("grpo_vps", "toy_grpo_vps"),
    Method("rredcot_immediate", "toy_rredcot_immediate", trained=False),
    Method("attribution", "toy_rredcot_gradient", trained=False),
    Method("leave_one_out", "toy_rredcot_leave_one_out", trained=False),
    Method("vineppo", "toy_vineppo"),
    Method("vineppo_gae", "toy_vineppo_gae", trained=False),
    Method("spo_tree", "toy_spo_tree"),
    Method("treerl", "toy_treerl"),
    Method("ibpo", "toy_ibpo"),
    Method("score", "toy_score"),
    Method("critique_grpo", "toy_critique_grpo"),
)


# Over turns; the baseline comes first. On stop-or-continue a turn is shown its offer alone, so nothing can be reset.
TURNS = (
    Method("grpo_turns", "toy_grpo_thoughts"),
    Method("mt_grpo", "toy_mt_grpo_thoughts"),
    Method("gigpo", "toy_gigpo_thoughts"),
    Method("gae_turns", "toy_gae_thoughts"),
    Method("igpo", "toy_igpo_thoughts"),
    Method("srpo_turns", "toy_srpo_thoughts"),
    Method("tree_turns", "toy_tree_thoughts"),
)
STOP = (
    Method("grpo_turns", "toy_grpo_stop"),
    Method("mt_grpo", "toy_grpo_stop", ("graph=mt_grpo", "advantage.last_turn=true")),
    Method("gigpo", "toy_gigpo_stop"),
    Method("gae_turns", "toy_gae_stop"),
    Method("igpo", "toy_grpo_stop", ("graph=igpo",)),
    Method("tree_turns", "toy_tree_stop"),
)
SUITES = {"responses": METHODS, "turns": TURNS, "stop": STOP}


def choose_methods(
    names: Sequence[str] | None,
    config_dirs: Sequence[str | Path] = (),
    to_train: bool = False,
    suite: Sequence[Method] = METHODS,
) -> list[Method]:
    """The named methods, the baseline first, which is that of the suite.

    A name is one of the suite, a recipe ("toy_srpo_1x8"), or either with settings after commas
    ("vineppo,value.continuations=20"). None takes all of the suite, or those that are `trained`.
    """
    if names is None:
        return [m for m in suite if m.trained or not to_train]
    recipes = list_choices("recipe", search_dirs(config_dirs))
    known = {m.name: m for m in suite}
    chosen = [suite[0]]
    for text in names:
        name, *overrides = text.split(",")
        base = known.get(name) or Method(name, name)
        if base.recipe not in recipes:
            raise ConfigError(f"method '{name}': no recipe '{base.recipe}'.{did_you_mean(name, [*known, *recipes])}")
        method = Method(text, base.recipe, (*base.overrides, *overrides)) if overrides else base
        if method not in chosen:
            chosen.append(method)
    return chosen
