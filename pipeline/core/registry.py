"""Component names. Strings only, so that listing them imports nothing.

A graph's `use` may name a registered component ("sampler.chains") or any class as "package.module:Class" or
"path/to/file.py:Class". Other packages add names through the entry-point group ``creditgraph.components`` (name =
"package.module:Class").
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from creditgraph.pipeline import ROOT
from creditgraph.pipeline.core.errors import ConfigError, any_extra, did_you_mean, raised_text
from creditgraph.pipeline.core.settings import build_config

OF_FILE = "own_"  # begins the name of a module that was loaded from a file
ENTRY_POINT_GROUP = "creditgraph.components"

# One line per component, kept in the order a prompt travels.
BUILTIN: dict[str, str] = {
    "prompts.dataset": "creditgraph.components.prompts.dataset:DatasetPrompts",
    "engine.local": "creditgraph.components.engine.local.engine:LocalEngine",
    "engine.vllm": "creditgraph.components.engine.vllm.engine:VllmEngine",
    "engine.sglang": "creditgraph.components.engine.sglang.engine:SGLangEngine",
    "weights.average": "creditgraph.components.engine.average:WeightAverage",
    "environment.stop": "creditgraph.components.environment.stop:Stop",
    "environment.thoughts": "creditgraph.components.environment.thoughts:ThoughtTurns",
    "environment.calculator": "creditgraph.components.environment.calculator:Calculator",
    "environment.code": "creditgraph.components.environment.code:CodeFeedback",
    "environment.http": "creditgraph.components.environment.http:Remote",
    "environment.openenv": "creditgraph.components.environment.openenv:OpenEnv",
    "environment.verifiers": "creditgraph.components.environment.verifiers:Verifiers",
    "environment.custom": "creditgraph.components.environment.custom:Custom",
    "sampler.chains": "creditgraph.components.sampler.chains:Chains",
    "sampler.failures": "creditgraph.components.sampler.failures:Failures",
    "sampler.dynamic": "creditgraph.components.sampler.dynamic:Dynamic",
    "sampler.retry": "creditgraph.components.sampler.retry:Retry",
    "sampler.critique": "creditgraph.components.sampler.critique:Critique",
    "sampler.environment": "creditgraph.components.sampler.environment:EnvironmentSampler",
    "sampler.turn_tree": "creditgraph.components.sampler.turn_tree:TurnTree",
    "verifier.exact": "creditgraph.components.verifier.exact:Exact",
    "verifier.math": "creditgraph.components.verifier.math:Math",
    "verifier.choice": "creditgraph.components.verifier.choice:Choice",
    "verifier.boolean": "creditgraph.components.verifier.choice:Boolean",
    "verifier.regex": "creditgraph.components.verifier.pattern:Regex",
    "verifier.steps": "creditgraph.components.verifier.steps:Steps",
    "verifier.code": "creditgraph.components.verifier.code:Code",
    "verifier.composite": "creditgraph.components.verifier.composite:Composite",
    "verifier.function": "creditgraph.components.verifier.function:Function",
    "verifier.external": "creditgraph.components.verifier.external:External",
    "rewards.outcome": "creditgraph.components.rewards.outcome:Outcome",
    "rewards.episode": "creditgraph.components.rewards.episode:EpisodeRewards",
    "rewards.overlong": "creditgraph.components.rewards.overlong:Overlong",
    "segmenter.thought": "creditgraph.components.segmenter.thought:Thoughts",
    "segmenter.fixed": "creditgraph.components.segmenter.fixed:Fixed",
    "segmenter.entropy_cuts": "creditgraph.components.segmenter.entropy_cuts:EntropyCuts",
    "segmenter.keyword_entropy": "creditgraph.components.segmenter.keyword_entropy:KeywordEntropy",
    "value.critic": "creditgraph.components.learner.hf.critic:Critic",
    "value.implicit": "creditgraph.components.learner.hf.implicit:ImplicitReward",
    "value.answer_likelihood": "creditgraph.components.value.answer_likelihood:AnswerLikelihood",
    "value.monte_carlo": "creditgraph.components.value.monte_carlo:MonteCarlo",
    "value.process_reward": "creditgraph.components.value.process_reward:ProcessReward",
    "value.leave_one_out": "creditgraph.components.value.leave_one_out:LeaveOneOut",
    "value.state_mean": "creditgraph.components.value.state_mean:StateMean",
    "value.gradient_attribution": "creditgraph.components.value.gradient_attribution:GradientAttribution",
    "localizer.self": "creditgraph.components.localizer.self_localizer:SelfLocalizer",
    "localizer.uniform": "creditgraph.components.localizer.uniform:UniformLocalizer",
    "localizer.oracle": "creditgraph.components.localizer.oracle:OracleLocalizer",
    "expander.reset": "creditgraph.components.expander.reset:Reset",
    "expander.turn_reset": "creditgraph.components.expander.turn_reset:TurnReset",
    "expander.tree": "creditgraph.components.expander.tree:Tree",
    "expander.intervene": "creditgraph.components.expander.intervene:Intervene",
    "reviser.compare": "creditgraph.components.reviser.compare:Compare",
    "buffer.merge": "creditgraph.components.buffer.merge:Merge",
    "buffer.merge_turns": "creditgraph.components.buffer.merge_turns:MergeTurns",
    "buffer.failed_episodes": "creditgraph.components.buffer.failed_episodes:FailedEpisodes",
    "advantage.group": "creditgraph.components.advantage.group:GroupAdvantage",
    "advantage.amplify": "creditgraph.components.advantage.amplify:Amplify",
    "advantage.gae": "creditgraph.components.advantage.gae:GAE",
    "advantage.process": "creditgraph.components.advantage.process:ProcessAdvantage",
    "advantage.prime": "creditgraph.components.advantage.prime:Prime",
    "advantage.additive": "creditgraph.components.advantage.additive:AdditiveAdvantage",
    "advantage.redistribute": "creditgraph.components.advantage.redistribute:Redistribute",
    "advantage.tree_siblings": "creditgraph.components.advantage.trees.siblings:TreeSiblings",
    "advantage.tree_paths": "creditgraph.components.advantage.trees.paths:TreePaths",
    "advantage.tree_leaves": "creditgraph.components.advantage.trees.leaves:TreeLeaves",
    "advantage.counterfactual": "creditgraph.components.advantage.counterfactual:Counterfactual",
    "advantage.retry": "creditgraph.components.advantage.retry:RetryAdvantage",
    "advantage.self_teacher": "creditgraph.components.advantage.teachers.self_teacher:SelfTeacher",
    "advantage.teacher": "creditgraph.components.advantage.teachers.teacher:Teacher",
    "advantage.critique": "creditgraph.components.advantage.critique:CritiqueAdvantage",
    "advantage.turn_group": "creditgraph.components.advantage.turns.turn_group:TurnGroup",
    "advantage.gigpo": "creditgraph.components.advantage.turns.gigpo:GiGPO",
    "advantage.turn_gae": "creditgraph.components.advantage.turns.turn_gae:TurnGAE",
    "advantage.information_gain": "creditgraph.components.advantage.turns.information_gain:InformationGain",
    "learner.hf": "creditgraph.components.learner.hf.learner:HFLearner",
    "learner.megatron": "creditgraph.components.learner.megatron.learner:MegatronLearner",
    "evaluator.accuracy": "creditgraph.components.evaluator.accuracy:Accuracy",
    "evaluator.episodes": "creditgraph.components.evaluator.episodes:EpisodeAccuracy",
    "evaluator.resets": "creditgraph.components.evaluator.resets:Resets",
}

# "package.module:Class" or "path/to/file.py:Class"; a registered name has no colon.
EXTERNAL = re.compile(r"^([A-Za-z_][\w.]*|.*\.py):[A-Za-z_]\w*$")
_OLD = re.compile(r"^(pipeline|components)\.[\w.]+:")  # names from before everything was imported from creditgraph


@cache
def known_components() -> dict[str, str]:
    """Name → "module:Class" of every registered component, built-in and from other packages."""
    components = dict(BUILTIN)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        # A plug-in cannot replace a built-in component under its own name.
        components.setdefault(entry.name, entry.value)
    return components


def target_of(use: str) -> str:
    """Resolves a graph's `use` to "module:Class" or "file.py:Class"; raises ConfigError for an unknown name."""
    if use in known_components():
        return known_components()[use]
    if _OLD.match(use) and ROOT.joinpath(*use.partition(":")[0].split(".")).with_suffix(".py").is_file():
        raise ConfigError(f"component '{use}' is now 'creditgraph.{use}'; write that.")
    if EXTERNAL.match(use):
        return use
    raise ConfigError(
        f"unknown component '{use}'; expected a registered name, "
        f"'package.module:Class' or 'path/to/file.py:Class'.{did_you_mean(use, known_components())}"
    )


def load_class(use: str) -> Any:
    """Imports the class that a graph's `use` names."""
    module_name, _, class_name = target_of(use).rpartition(":")
    if module_name.endswith(".py"):
        return _class_of_file(use)
    try:
        with any_extra():
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


@cache  # every import of a file makes new classes
def _class_of_file(use: str) -> Any:
    try:
        found = load_own(use, "class")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(found, type):
        raise ConfigError(f"component '{use}' is not a class.")
    return found


def load_own(name: str, what: str) -> Any:
    """The object of a user's own that "module:name" or "path/to/file.py:name" names.

    Args:
        name: the name.
        what: "function" or "class", for error texts.

    Raises:
        ValueError: there is none, or importing it failed.
    """
    expected = "module:name or path/to/file.py:name"
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ValueError(f"{what}: expected {expected}, got '{name}'.")
    file = Path(place).expanduser()
    if place.endswith(".py") and not file.is_file():
        near = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ValueError(f"{what} '{name}': {file.absolute()} does not exist.{did_you_mean(file.name, near)}")
    try:
        module = _file_module(file) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = f"module '{error.name}' cannot be imported"
        raise ValueError(f"{what} '{name}': {missing}; install it, or name it as {expected}.") from error
    except Exception as error:  # the user's own code
        raise ValueError(f"{what} '{name}': importing {place} failed ({raised_text(error)}); correct it.") from error
    found = getattr(module, attribute, None)
    if found is None:
        wanted = inspect.isclass if what == "class" else inspect.isfunction
        known = [key for key, value in vars(module).items() if wanted(value)]
        raise ValueError(f"{what} '{name}': {place} has no {what} '{attribute}'.{did_you_mean(attribute, known)}")
    return found


def _file_module(path: Path) -> ModuleType:
    """The module in a file, loaded again."""
    # Under a name that hides no other module; dataclasses look their module up under it.
    spec = importlib.util.spec_from_file_location(f"{OF_FILE}{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    folder = str(path.parent.absolute())
    if folder not in sys.path:
        sys.path.append(folder)  # modules beside the file
    spec.loader.exec_module(module)
    return module


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
