"""Settings of a learner's loss, and the names of the shipped objectives."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from creditgraph.components.learner.objective.base import Objective
from creditgraph.components.learner.objective.entropy_mask import EntropyMask
from creditgraph.components.learner.objective.importance import Importance
from creditgraph.components.learner.objective.kl import KL
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.registry import load_class
from creditgraph.pipeline.core.settings import SettingsError, build_config

# One line per objective.
OBJECTIVES: dict[str, str] = {
    "reinforce": "creditgraph.components.learner.objective.reinforce:Reinforce",
    "ppo_clip": "creditgraph.components.learner.objective.ppo_clip:PPOClip",
    "cispo": "creditgraph.components.learner.objective.cispo:CISPO",
    "fipo": "creditgraph.components.learner.objective.fipo:FIPO",
    "gspo": "creditgraph.components.learner.objective.gspo:GSPO",
    "gspo_gated": "creditgraph.components.learner.objective.gspo:GatedGSPO",
    "distill": "creditgraph.components.learner.objective.distill:Distill",
    "trace": "creditgraph.components.learner.objective.trace:Trace",
    "shaped_probability": "creditgraph.components.learner.objective.shaped_probability:ShapedProbability",
}


def load_objective(use: str) -> type[Objective]:
    """The class of a shipped objective, or of "package.module:Class"; raises ConfigError when there is none."""
    if use not in OBJECTIVES and ":" not in use:
        raise ConfigError(
            f"'{use}' is not an objective; expected a registered name or 'package.module:Class'."
            f"{did_you_mean(use, OBJECTIVES)}"
        )
    cls: type[Objective] = load_class(OBJECTIVES.get(use, use))
    if not issubclass(cls, Objective):
        raise ConfigError(f"{use} is not an objective; derive it from creditgraph.Objective.")
    return cls


def shipped_metrics() -> tuple[Metric, ...]:
    """Metrics of the shipped objectives, each name once."""
    metrics = [metric for use in OBJECTIVES for metric in load_objective(use).metrics]
    return tuple({metric.name: metric for metric in metrics}.values())


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """Loss per token, and how tokens are averaged."""

    choices: ClassVar[dict[str, str]] = OBJECTIVES  # whose settings `creditgraph components` lists

    use: str = "ppo_clip"
    """a name in `OBJECTIVES`, or "package.module:Class" of a subclass of creditgraph.Objective"""
    config: Any = field(default_factory=dict)
    """settings of that objective, see its `Config`"""
    entropy_mask: EntropyMask = field(default_factory=EntropyMask)
    """mask of low-entropy tokens: on the traces of an objective that has them, on any loss, or both"""
    kl: KL = field(default_factory=KL)
    """penalty against the initial model"""
    entropy_bonus: float = 0.0
    """weight of the current policy's entropy, added to what is maximised [1/nat]"""
    importance: Importance = field(default_factory=Importance)
    """importance weights learner/engine"""
    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"
    """aggregation of token terms to one number; see `loss.py`"""
    constant_length: int = 0
    """L_max of aggregate "constant" [tokens]"""

    def __post_init__(self) -> None:
        try:
            objective = load_objective(self.use)
        except ConfigError as error:
            raise SettingsError([f"use: {error}"]) from error
        except Exception as error:  # a module from outside may fail in any way
            raise SettingsError([f"use: importing '{self.use}' failed with {type(error).__name__}: {error}"]) from error
        config, problems = build_config(objective.Config, self.config, "config")
        if problems:
            raise SettingsError(problems)
        object.__setattr__(self, "config", config)
        self.entropy_mask.check(self.use, objective.has_trace)
        if (self.aggregate == "constant") != (self.constant_length > 0):
            raise ValueError(
                f"aggregate '{self.aggregate}' with constant_length {self.constant_length}: 'constant' divides by "
                "B·constant_length and needs it above 0 (the response budget); the others do not use it, leave it at 0."
            )

    def build(self) -> Objective:
        """The objective with its settings."""
        return load_objective(self.use)(self.config)
