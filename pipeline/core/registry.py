"""Component names. Strings only, so that listing them imports nothing.

A graph's `use` may name a registered component ("sampler.chains") or any class as "package.module:Class". Other
packages add names through the entry-point group ``creditgraph.components`` (name = "package.module:Class").
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pipeline.core.errors import ConfigError, did_you_mean
from pipeline.core.settings import build_config

ENTRY_POINT_GROUP = "creditgraph.components"

# One line per component, kept in the order a prompt travels.
BUILTIN: dict[str, str] = {
    "prompts.dataset": "components.prompts.dataset:DatasetPrompts",
    "engine.local": "components.engine.local.engine:LocalEngine",
    "engine.vllm": "components.engine.vllm.engine:VllmEngine",
    "engine.sglang": "components.engine.sglang.engine:SGLangEngine",
    "sampler.chains": "components.sampler.chains:Chains",
    "sampler.failures": "components.sampler.failures:Failures",
    "sampler.dynamic": "components.sampler.dynamic:Dynamic",
    "sampler.retry": "components.sampler.retry:Retry",
    "sampler.critique": "components.sampler.critique:Critique",
    "verifier.exact": "components.verifier.exact:Exact",
    "verifier.math": "components.verifier.math:Math",
    "verifier.choice": "components.verifier.choice:Choice",
    "verifier.boolean": "components.verifier.choice:Boolean",
    "verifier.regex": "components.verifier.pattern:Regex",
    "verifier.code": "components.verifier.code:Code",
    "verifier.composite": "components.verifier.composite:Composite",
    "verifier.function": "components.verifier.function:Function",
    "verifier.external": "components.verifier.external:External",
    "rewards.outcome": "components.rewards.outcome:Outcome",
    "rewards.overlong": "components.rewards.overlong:Overlong",
    "segmenter.thought": "components.segmenter.thought:Thoughts",
    "segmenter.fixed": "components.segmenter.fixed:Fixed",
    "segmenter.entropy_cuts": "components.segmenter.entropy_cuts:EntropyCuts",
    "segmenter.keyword_entropy": "components.segmenter.keyword_entropy:KeywordEntropy",
    "value.answer_likelihood": "components.value.answer_likelihood:AnswerLikelihood",
    "value.monte_carlo": "components.value.monte_carlo:MonteCarlo",
    "value.leave_one_out": "components.value.leave_one_out:LeaveOneOut",
    "value.gradient_attribution": "components.value.gradient_attribution:GradientAttribution",
    "localizer.self": "components.localizer.self_localizer:SelfLocalizer",
    "localizer.uniform": "components.localizer.uniform:UniformLocalizer",
    "localizer.oracle": "components.localizer.oracle:OracleLocalizer",
    "expander.reset": "components.expander.reset:Reset",
    "expander.tree": "components.expander.tree:Tree",
    "expander.intervene": "components.expander.intervene:Intervene",
    "reviser.compare": "components.reviser.compare:Compare",
    "buffer.merge": "components.buffer.merge:Merge",
    "advantage.group": "components.advantage.group:GroupAdvantage",
    "advantage.amplify": "components.advantage.amplify:Amplify",
    "advantage.td": "components.advantage.td:TDAdvantage",
    "advantage.additive": "components.advantage.additive:AdditiveAdvantage",
    "advantage.redistribute": "components.advantage.redistribute:Redistribute",
    "advantage.tree_siblings": "components.advantage.tree_siblings:TreeSiblings",
    "advantage.tree_paths": "components.advantage.tree_paths:TreePaths",
    "advantage.counterfactual": "components.advantage.counterfactual:Counterfactual",
    "advantage.retry": "components.advantage.retry:RetryAdvantage",
    "advantage.self_teacher": "components.advantage.self_teacher:SelfTeacher",
    "advantage.teacher": "components.advantage.teacher:Teacher",
    "advantage.critique": "components.advantage.critique:CritiqueAdvantage",
    "learner.hf": "components.learner.hf.learner:HFLearner",
    "learner.megatron": "components.learner.megatron.learner:MegatronLearner",
    "evaluator.accuracy": "components.evaluator.accuracy:Accuracy",
    "evaluator.resets": "components.evaluator.resets:Resets",
}

# "package.module:Class"; a registered name has no colon.
_EXTERNAL = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


@cache
def known_components() -> dict[str, str]:
    """Name → "module:Class" of every registered component, built-in and from other packages."""
    components = dict(BUILTIN)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        # A plug-in cannot replace a built-in component under its own name.
        components.setdefault(entry.name, entry.value)
    return components


def target_of(use: str) -> str:
    """Resolves a graph's `use` to "module:Class"; raises ConfigError for an unknown name."""
    if use in known_components():
        return known_components()[use]
    if _EXTERNAL.match(use):
        return use
    raise ConfigError(
        f"unknown component '{use}'; expected a registered name or "
        f"'package.module:Class'.{did_you_mean(use, known_components())}"
    )


def load_class(use: str) -> Any:
    """Imports the class that a graph's `use` names."""
    module_name, class_name = target_of(use).split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"component '{use}': module '{error.name}' cannot be imported; install it or correct '{module_name}'."
        ) from error
    try:
        cls = getattr(module, class_name)
    except AttributeError:
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module_name]
        raise ConfigError(
            f"component '{use}': no class '{class_name}' in {module_name}.{did_you_mean(class_name, classes)}"
        ) from None
    if not isinstance(cls, type):
        raise ConfigError(f"component '{use}': {module_name}:{class_name} is not a class.")
    return cls


def build_component(use: str, settings: Mapping[str, Any], place: str) -> Any:
    """A component outside of a graph, from its registered name (or module:Class) and settings; not yet set up.

    Raises:
        ConfigError: an unknown component or setting; `place` names it.
    """
    component_class = load_class(use)
    config, problems = build_config(component_class.Config, settings, place)
    if problems:
        raise ConfigError("\n".join(problems))
    return component_class(config)
