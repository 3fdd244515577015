"""Handles, which are live objects on wires, and the requests and responses of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Payload, Prompts, Rewards, Trajectories


class Handle(Payload):
    """A live object that a node returns, such as a `Policy`: it cannot be recorded, sent or kept for later."""


@dataclass(frozen=True, kw_only=True)
class ThoughtLimits:
    """Thought-by-thought generation: after each stop string a new thought begins, until the last one.

    Attributes:
        stop: string that closes a thought; kept in the response.
        final: a thought that contains this string is the last one.
        max_tokens: tokens per thought; a thought that reaches it is closed there without the stop string.
        max_thoughts: number of thoughts, inherited ones not counted.
        ends_at_eos: whether an end-of-text token ends the response. If not, it closes its thought as the stop string
            does, and only a thought of nothing else ends the response; the token stays in the response.
    """

    stop: str = "</thought>"
    final: str = "\\boxed{"
    max_tokens: int = 256
    max_thoughts: int = 32
    ends_at_eos: bool = True


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: 0 is greedy (log-probs and entropies are then those of temperature 1).
        top_p, top_k: truncation of the draw; 1.0 and 0 switch it off. Log-probs are those before truncation.
        max_tokens: response budget in tokens.
        stop: strings that end a response; kept in it.
        thoughts: thought-by-thought limits, or None for one plain response.
        split: "line" or "sentence": where the thoughts of a plain response end, found in its text; "" finds none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    thoughts: ThoughtLimits | None = None
    split: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Progress:
    """Tokens that earlier requests with the same seeds have sampled for rows that now continue; new rows are empty.

    Attributes:
        tokens: Jagged int32, sampled so far.
        thought_ends: Jagged int32, exclusive ends of the thoughts closed so far, as indices into `tokens`.
        versions: optional int64 [N], weights that sampled the first of `tokens`, whose cache an engine may have kept.
    """

    tokens: Jagged
    thought_ends: Jagged
    versions: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests:
    """A batch of generation requests, one row per sample; equal rows of `tokens` share their prefill.

    With `progress` a row continues where it was paused, in the middle of its thought and of its random stream:
    `tokens` remains the text before its first sampled token, and all limits count the whole row.

    Attributes:
        tokens: Jagged int32, everything before the first sampled token (prompt, and an inherited prefix if any).
        seed: int64 [N], one keyed seed per row (`Stream.seeds`); token t of a row depends on nothing else.
        sampling: shared by the batch.
        max_tokens: optional int64 [N], per-row response budget that overrides `sampling.max_tokens`.
        max_thoughts: optional int64 [N], per-row limit that overrides `sampling.thoughts.max_thoughts`.
        progress: optional, tokens that the rows have sampled before; only for policies whose `continues` is true.
        pause: optional int64 [N], new tokens after which a row that has not ended is paused; only for policies whose
            `continues` is true.
        prompt_uid: optional int64 [N], the prompt that each row answers, for what carries rows over iterations.
    """

    tokens: Jagged
    seed: Tensor
    sampling: Sampling
    max_tokens: Tensor | None = None
    max_thoughts: Tensor | None = None
    progress: Progress | None = None
    pause: Tensor | None = None
    prompt_uid: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Completions:
    """Response to `Requests`, row for row.

    Attributes:
        tokens: Jagged int32, sampled tokens (EOS and stop strings included); only the new ones of a row that continued.
        logprobs, entropies: Jagged float32, see `Trajectories`.
        thought_ends: Jagged int32, exclusive ends within the sampled tokens; empty rows without thought limits. For a
            row that continued, all of its ends, counted from its very first sampled token.
        finish_reason: "stop" (a stop string), "final" (the final thought), "eos", "length", "thoughts" (max_thoughts),
            "paused".
        text: decoded sampled tokens, special tokens kept.
        token_versions: Jagged int32, version of the weights that sampled each token; None if all are the policy's.
        routed_experts: as of `Trajectories`, of the request's tokens and the sampled ones; None from other engines.
    """

    tokens: Jagged
    logprobs: Jagged
    entropies: Jagged
    thought_ends: Jagged
    finish_reason: list[str]
    text: list[str]
    token_versions: Jagged | None = None
    routed_experts: Jagged | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores:
    """Teacher-forced log-probs and entropies [nats] over the scored tokens, Jagged float32.

    Attributes:
        logprobs, entropies: of the tokens and of the distributions they are from.
        top_tokens: int64 [tokens, k], the most likely tokens in the place of each, or None if they were not asked for.
        top_logprobs: float32 [tokens, k], their log-probs, the largest first.
    """

    logprobs: Jagged
    entropies: Jagged
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


Answer = Callable[[list[int], Completions | None], tuple[list[int], Requests]]
"""(rows, their completions) → which of these go on, in the same order, and their next requests; None at first"""


class Policy(Handle, ABC):
    """A language model that samples. A handle: it travels on wires but is not recorded."""

    version: int
    tokenizer: Any  # a Hugging Face fast tokenizer
    continues: ClassVar[bool] = False
    """whether `generate` supports `Requests.progress` and `Requests.pause`"""

    @abstractmethod
    def generate(self, requests: Requests) -> Completions:
        """Samples one completion per row."""

    def converse(self, rows: int, answer: Answer) -> None:
        """Samples completion after completion of rows 0 to `rows` − 1, each once `answer` has requested it.

        Here all rows go on together, in rounds. Engines that take requests at any time override this: they call
        `answer` for one row at a time, from several threads, so that no row waits for another.
        """
        going, completions = list(range(rows)), None
        while going:
            going, requests = answer(going, completions)
            if going:
                completions = self.generate(requests)

    @abstractmethod
    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """Log-probs and entropies of `tokens` [N rows] given `context` [N rows], both Jagged int32, teacher-forced.

        With `top` also those of the `top` most likely tokens in each place; CreditgraphError where an engine has none.
        """

    def score_branches(
        self, trunk: Jagged, row: Tensor, at: Tensor, tokens: Jagged, temperature: float = 1.0
    ) -> Scores:
        """Scores row b of `tokens` as the continuation of the first `at[b]` tokens of trunk `row[b]`.

        Branches do not see each other.

        Engines that can run a trunk once for all its branches override this; the results are the same.

        Args:
            trunk: Jagged int32 [R rows].
            row: int64 [B], trunk of each branch.
            at: int64 [B], 1 to the trunk's length.
            tokens: Jagged int32 [B rows].
            temperature: temperature of the softmax.
        """
        return self.score(trunk.slice_rows(torch.zeros_like(at), at, row), tokens, temperature)

    def attribute(self, context: Jagged, tokens: Jagged, temperature: float = 1.0) -> Jagged:
        """Gradient × input embedding of each `context` token, float32.

        It says how much the token moves the summed log-prob of the row's `tokens`.

        Raises CreditgraphError for an engine without gradients, which is the default.
        """
        raise CreditgraphError(
            f"{self.origin or 'policy'}: {type(self).__name__} gives no gradients; expected an engine that can "
            "attribute a log-prob to its context. Choose one (creditgraph components engine), or an estimator "
            "of values that needs no gradients."
        )


class Verifier(Handle, ABC):
    """Decides whether a response is correct. A handle, like `Policy`; verifying the same row again is free."""

    @abstractmethod
    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        """Returns one reward per trajectory. A row that cannot be verified is `valid=False` with the reason."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an environment answers to the text of a turn; a plain tuple (observation, reward, done) is read as one.

    Attributes:
        observation: text that the policy reads next; not read after the last turn.
        reward: of this turn, a finite number.
        done: whether the episode has ended.
    """

    observation: str
    reward: float
    done: bool


class Environments(Handle, ABC):
    """Makes environments. A handle, like `Policy`.

    An environment holds one episode. Its three methods are plain or async:

    - `reset(problem)` returns the first observation, a text. `problem` is a dict: the metadata of the prompt, "prompt"
      (its text as the data section made it), "question", "answer", and "seed", a number of the episode's own for random
      draws;
    - `step(text)` receives the response of a turn, special tokens at its end left out, and returns a `Step`;
    - `close()` releases what it holds.

    An attribute `state`, if it has one, is read after `reset` and `step`: a text, equal for equal states.

    Attributes:
        at_once: calls of all environments that can run at a time, None without a limit. The time limit of a call begins
            when it runs, so that none is lost because others are slow.
    """

    at_once: int | None = None

    @abstractmethod
    def make(self) -> Any:
        """A new environment, for one episode."""

    def exact_values(self, chance: Callable[[str, Collection[str]], float]) -> dict[str, float] | None:
        """V^π of every state by its key, where it is known in closed form; None, the default, where it is not.

        Args:
            chance: (observation, words) → probability that a response to the observation alone has one of the words.
        """
        return None


def known_entropies(entropies: Tensor, reader: str) -> Tensor:
    """Returns the entropies; raises CreditgraphError if the engine left some out (NaN). `reader` names the caller."""
    unknown = int(entropies.isnan().sum())
    if unknown:
        raise CreditgraphError(
            f"{reader}: the engine gave no entropy for {unknown} of {len(entropies)} tokens; expected all of them. "
            "Choose an engine that returns them (creditgraph components engine), or a method that reads none."
        )
    return entropies
