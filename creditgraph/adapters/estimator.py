"""What hooks of trainers share: advantage estimators and losses that are functions of padded tensors."""

import importlib.abc
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.loss import check_by_parts, loss_inputs, token_losses
from creditgraph.adapters.record import OPTION
from creditgraph.adapters.rows import Rollouts
from creditgraph.components.learner.objective import ObjectiveSettings

logger = logging.getLogger("creditgraph")
PREFIX = "creditgraph:"
States = Callable[..., Sequence[Sequence[str]]]


class Estimator:
    """An advantage estimator: called with the trainer's tensors, returns advantages and returns, both [N, T].

    The graph is built at the first call, so that a graph that cannot run here costs nothing until it is chosen.

    Args:
        graph, overrides: as of `CreditGraph`.
        states: called with the trainer's arguments; returns a key of the state before each turn of each row.
    """

    serves = False
    """whether the trainer may have a model that a graph can ask"""
    entropies = False
    """whether it may have entropies of the sampled tokens"""
    temperature = 1.0
    """at which texts are scored"""

    def __init__(self, graph: str, *overrides: str, states: States | None = None) -> None:
        self.graph, self.overrides, self.states = graph, overrides, states
        self._credit: CreditGraph | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # SkyRL sends estimators to other processes; each builds its own graph.
        return _rebuilt, (type(self), self.graph, self.overrides, self.states)

    @property
    def credit(self) -> CreditGraph:
        """The graph, built once."""
        if self._credit is None:
            credit = CreditGraph(self.graph, *self.overrides)
            # Only a batch shows whether there are any.
            asked = {"policy": self.serves, "continues": self.serves}
            credit.check_given(values=True, logprobs=True, entropies=self.entropies, **asked)
            self._credit = credit
        return self._credit

    @torch.no_grad()
    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        values: Tensor | None = None,
        tokens: Tensor | None = None,
        episode: Sequence[Hashable] | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        logprobs: Tensor | None = None,
        answers: Sequence[str] | None = None,
        entropies: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns of responses.

        Args:
            token_level_rewards, response_mask: [N, T].
            index: N ids of prompts; without them each row is a group of its own.
            values: [N, T], for graphs with a critic; returns are then advantages plus values, else the advantages.
            tokens: [N, T], ids of the responses, where the trainer passes them.
            episode, prompts, logprobs, answers, entropies: as of `Rollouts`.
            given: further arguments of the trainer, for `states`.
        """
        group = range(len(response_mask)) if index is None else index
        arguments = {"token_level_rewards": token_level_rewards, "response_mask": response_mask, "index": index}
        states = None if self.states is None else self.states(**arguments, values=values, **given)
        rollouts = Rollouts(
            mask=response_mask,
            rewards=token_level_rewards,
            group=list(group),
            episode=episode,
            tokens=tokens,
            prompts=prompts,
            states=states,
            values=values,
            logprobs=logprobs,
            answers=answers,
            entropies=entropies,
            temperature=self.temperature,
        )
        advantages = self.credit(rollouts)
        returns = advantages if values is None else advantages + torch.where(response_mask != 0, values, 0.0)
        return advantages, returns


def _rebuilt(kind: type[Estimator], graph: str, overrides: tuple[str, ...], states: States | None) -> Estimator:
    return kind(graph, *overrides, states=states)


class Loss:
    """A graph's objective on the trainer's log-probs; built at the first call, as `Estimator`.

    Args:
        graph, overrides: as of `CreditGraph`.
    """

    def __init__(self, graph: str, *overrides: str) -> None:
        self.graph, self.overrides = graph, overrides
        self._settings: ObjectiveSettings | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.graph, *self.overrides)

    @property
    def settings(self) -> ObjectiveSettings:
        """Settings of the objective; raises ConfigError where it needs what a loss hook does not pass."""
        if self._settings is None:
            # Losses run in other processes than credit: what is recorded is that of the estimator.
            settings = CreditGraph(self.graph, *(o for o in self.overrides if not o.startswith(OPTION))).objective
            check_by_parts(settings, f"graph '{self.graph}'")
            self._settings = settings
        return self._settings

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of each token, [N, T], 0 where the mask is; and metrics. All arguments are [N, T]."""
        inputs = loss_inputs(logprobs, old_logprobs, advantages, mask)
        return token_losses(inputs, self.settings, mask.shape[1])


def settings_of(given: Sequence[str] | str | None) -> tuple[str, ...]:
    """Overrides as another trainer's settings hold them: none, one, or a list."""
    return (given,) if isinstance(given, str) else tuple(given or ())


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function with a module when it has been imported."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            self.change(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def on_import(name: str, change: Callable[[Any], None]) -> None:
    """Calls `change` with the module `name` before others import from it, or now if it is imported already."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, change))


def check_version(package: str, tested: Sequence[str]) -> None:
    """Warns where the installed version is none of the tested series."""
    version = importlib.metadata.version(package)
    if not any(version == series or version.startswith(series + ".") for series in tested):
        logger.warning(
            "creditgraph.adapters: %s %s is installed; tested with %s. Where its hooks have changed, advantages may be "
            "wrong: compare a batch with the trainer's own estimator before you train.",
            package,
            version,
            " and ".join(f"{series}.*" for series in tested),
        )
