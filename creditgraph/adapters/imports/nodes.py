"""The nodes of an imported run: what another trainer recorded, which nothing here computes again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from creditgraph.adapters.endpoint import EndpointPolicy
from creditgraph.components.advantage.explanations import rewards_of_groups
from creditgraph.components.models.load import load_tokenizer
from creditgraph.pipeline.app.credit.sessions import RecordedVerdicts
from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.payloads import (
    Credit,
    Prompts,
    ReferenceLogprobs,
    Rewards,
    TokenLogprobs,
    Trajectories,
    Turns,
)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the files had; an output that they lack is not recorded."""

    prompts: Prompts
    trajectories: Trajectories
    rewards: Annotated[Rewards, same_rows("trajectories")]
    turns: Annotated[Turns, same_rows("trajectories")]
    credit: Annotated[Credit, same_rows("trajectories")]


class ImportedRollouts(Component):
    """Rollouts that another trainer sampled and rewarded, with the advantages that it trained on."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Where they are from."""

        trainer: str = ""
        """format of the files, as `creditgraph import --from` takes it"""

    config: Config

    def run(self) -> Recorded:
        """Raises RunError: they were recorded."""
        _elsewhere(self.context.node, self.config.trainer)

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """What the file says, and the rewards of the group; a formula is not known."""
        rewards, trajectories = outputs["rewards"], outputs["trajectories"]
        groups = rewards_of_groups(rewards.value, rewards.valid, trajectories.group)
        return [f"as {self.config.trainer} recorded it; no file has the formula\n{text}" for text in groups]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Log-probs of the trainer before its step."""

    logprobs: Annotated[TokenLogprobs, same_rows("trajectories")]
    reference: Annotated[ReferenceLogprobs, same_rows("trajectories")]


class ImportedTrainer(Component):
    """The trainer that learned from the rows; its settings and weights are not known here.

    Of several credits the first is what its rows are shown with.
    """

    placement = "collective"

    @dataclass(frozen=True, kw_only=True)
    class Config(ImportedRollouts.Config):
        """Which trainer it is."""

    config: Config

    def run(self, *, trajectories: Trajectories, credit: list[Credit]) -> Trained:
        """Raises RunError: it learned elsewhere."""
        _elsewhere(self.context.node, self.config.trainer)


def _elsewhere(node: str, trainer: str) -> NoReturn:
    raise RunError(
        f"node '{node}': its values were imported from files of {trainer}, and only that trainer makes such values "
        "again. Replay a node that reads them, such as one of `creditgraph import --graph NAME`."
    )


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The policy."""

    policy: Policy


class Endpoint(Component):
    """A policy that scores texts at an OpenAI-compatible server; a key for it is in OPENAI_API_KEY."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The server."""

        url: str = ""
        """with the version, such as http://localhost:8000/v1"""
        model: str = ""
        """the name that the server gives the model"""

    config: Config

    def run(self) -> Policies:
        """The policy, with the tokenizer of the run's model."""
        tokenizer = load_tokenizer(self.context.model)
        key = os.environ.get("OPENAI_API_KEY", "")
        return Policies(policy=EndpointPolicy(self.config.url, self.config.model, tokenizer, key=key))


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """The verifier."""

    verifier: Verifier


class RecordedVerifier(Component):
    """A verifier that repeats recorded rewards and knows no others."""

    def run(self, *, rewards: Rewards) -> Verdicts:
        """The verifier of these rewards."""
        return Verdicts(verifier=RecordedVerdicts(rewards))
