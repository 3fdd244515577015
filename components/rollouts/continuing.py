"""A policy that pauses requests after some tokens, and answers or continues those of earlier iterations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from creditgraph.components.rollouts.requests import scatter_rows
from creditgraph.components.text.stops import decode_rows
from creditgraph.pipeline.core.handles import Completions, Policy, Progress, Requests, Scores
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Batch, Trajectories, no_experts


@dataclass(frozen=True, eq=False, kw_only=True)
class Begun(Batch):
    """Requests of prompts in flight, and what they have sampled; the uid of each is its seed.

    Attributes:
        prompt_uid: int64 [N].
        tokens, logprobs, entropies, thought_ends, finish_reason, text: as of `Completions`, all tokens so far; "paused"
            for one that has not ended, without text.
        token_versions: Jagged int32, version of the weights that sampled each token.
        routed_experts: as of `Completions`, of the last request, which passes all tokens before through the model too.
    """

    prompt_uid: Tensor
    tokens: Jagged
    logprobs: Jagged
    entropies: Jagged
    thought_ends: Jagged
    token_versions: Jagged
    routed_experts: Jagged
    finish_reason: list[str]
    text: list[str]

    @staticmethod
    def blank(seed: Tensor, prompt_uid: Tensor) -> Begun:
        """Requests without a token yet."""
        floats = Jagged.from_lengths(torch.zeros(0), torch.zeros_like(seed))
        ints = floats.to(torch.int32)
        return Begun(
            uid=seed,
            prompt_uid=prompt_uid,
            tokens=ints,
            logprobs=floats,
            entropies=floats,
            thought_ends=ints,
            token_versions=ints,
            routed_experts=no_experts(len(seed)),
            finish_reason=["paused"] * len(seed),
            text=[""] * len(seed),
        )

    def first_versions(self, version: int) -> Tensor:
        """int64 [N]: of each request's first token; `version` for one without tokens."""
        versions = self.token_versions
        begun = versions.lengths > 0
        first = torch.full_like(self.prompt_uid, version)
        first[begun] = versions.values[versions.offsets[:-1][begun]].to(torch.int64)
        return first

    @property
    def paused(self) -> Tensor:
        """bool [N]: requests that have not ended."""
        return torch.tensor([reason == "paused" for reason in self.finish_reason], dtype=torch.bool)


class Continuing(Policy):
    """A policy that answers known requests from memory, and pauses the others after their share of tokens.

    Args:
        policy: the policy that samples; its `continues` must be true.
        begun: requests of earlier iterations.
        tokens: new tokens of each prompt in this iteration, one request after the other.
        finish: int64, uids of prompts whose requests are finished, whatever it takes.

    Attributes:
        begun: those of earlier iterations and of this one.
        steps: new tokens of the longest request of each call, summed over calls.
        sampled: new tokens of all requests.
    """

    continues = True

    def __init__(self, policy: Policy, begun: Begun, tokens: int, finish: Tensor) -> None:
        self.version = policy.version
        self.tokenizer = policy.tokenizer
        self.begun = begun
        self.steps = 0
        self.sampled = 0
        self._policy = policy
        self._tokens = tokens
        self._finish = finish
        self._waiting: set[int] = set()
        self._spent: dict[int, int] = {}  # prompt → new tokens of its requests in turn

    @property
    def waiting(self) -> Tensor:
        """int64: uids of prompts with a request that is paused in this iteration."""
        # Paused ones of an earlier iteration may be of a later stage, which has not been reached again yet.
        return torch.tensor(sorted(self._waiting), dtype=torch.int64)

    def generate(self, requests: Requests) -> Completions:
        """Whole completions with `token_versions`; "paused" and without text for a row that is not finished."""
        if requests.prompt_uid is None:
            raise ValueError("carried requests name their prompts; set Requests.prompt_uid.")
        rows = self._known(requests.seed, requests.prompt_uid)
        left = self._left(requests)
        going = (rows.paused & (left > 0)).nonzero()[:, 0]
        if len(going):
            rows = self._advance(rows, requests, going, left[going])
        self._waiting.update(rows.prompt_uid[rows.paused].tolist())
        others = ~torch.isin(self.begun.uid, requests.seed)
        self.begun = Begun.concat([self.begun.select(others), rows])
        return Completions(
            tokens=rows.tokens,
            logprobs=rows.logprobs,
            entropies=rows.entropies,
            thought_ends=rows.thought_ends,
            finish_reason=rows.finish_reason,
            text=rows.text,
            token_versions=rows.token_versions,
            routed_experts=rows.routed_experts if len(rows.routed_experts.values) else None,
        )

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """That of the policy."""
        return self._policy.score(context, tokens, temperature, top)

    def score_branches(
        self, trunk: Jagged, row: Tensor, at: Tensor, tokens: Jagged, temperature: float = 1.0
    ) -> Scores:
        """Those of the policy."""
        return self._policy.score_branches(trunk, row, at, tokens, temperature)

    def _known(self, seed: Tensor, prompt_uid: Tensor) -> Begun:
        """The requests with these seeds as far as they are."""
        new = ~torch.isin(seed, self.begun.uid)
        both = Begun.concat([self.begun, Begun.blank(seed[new], prompt_uid[new])])
        return both.select(both.index_of(seed))

    def _left(self, requests: Requests) -> Tensor:
        """int64 [N]: new tokens that each request may still have in this iteration."""
        owner = requests.prompt_uid
        assert owner is not None
        spent = torch.tensor([self._spent.get(uid, 0) for uid in owner.tolist()], dtype=torch.int64)
        whole = torch.full_like(spent, requests.sampling.max_tokens)
        return torch.where(torch.isin(owner, self._finish), whole, (self._tokens - spent).clamp(min=0))

    def _advance(self, rows: Begun, requests: Requests, going: Tensor, pause: Tensor) -> Begun:
        """Samples on at the rows `going` [M], at most `pause` [M] tokens each."""
        before = rows.select(going)
        done = self._policy.generate(
            Requests(
                tokens=requests.tokens.select(going),
                seed=requests.seed[going],
                sampling=requests.sampling,
                max_tokens=None if requests.max_tokens is None else requests.max_tokens[going],
                max_thoughts=None if requests.max_thoughts is None else requests.max_thoughts[going],
                progress=Progress(
                    tokens=before.tokens, thought_ends=before.thought_ends, versions=before.first_versions(self.version)
                ),
                pause=pause,
            )
        )
        count = len(rows)
        new = scatter_rows(done.tokens, going, count)
        self._count(rows.prompt_uid, new.lengths)
        # A row continues with all of its thought ends and experts, so they replace the earlier ones.
        latest = torch.arange(count)
        latest[going] = count + torch.arange(len(going))
        experts = done.routed_experts or no_experts(len(going))
        tokens = rows.tokens.join(new)
        reasons = list(rows.finish_reason)
        texts = list(rows.text)
        whole = decode_rows(self.tokenizer, tokens.select(going).to_lists())
        begun = before.tokens.lengths.tolist()
        for i, place in enumerate(going.tolist()):
            reasons[place] = done.finish_reason[i]
            if reasons[place] != "paused":
                # Decoded as a whole if it was paused: two decoded parts need not join to the decoding of their tokens.
                texts[place] = whole[i] if begun[i] else done.text[i]
        return rows.replace(
            tokens=tokens,
            logprobs=rows.logprobs.join(scatter_rows(done.logprobs, going, count)),
            entropies=rows.entropies.join(scatter_rows(done.entropies, going, count)),
            thought_ends=Jagged.concat([rows.thought_ends, done.thought_ends]).select(latest),
            routed_experts=Jagged.concat([rows.routed_experts, experts]).select(latest),
            token_versions=rows.token_versions.join(
                new.with_values(torch.full_like(new.values, self.version, dtype=torch.int32))
            ),
            finish_reason=reasons,
            text=texts,
        )

    def _count(self, owner: Tensor, new: Tensor) -> None:
        self.sampled += int(new.sum())
        self.steps += int(new.max())
        longest: dict[int, int] = {}
        for uid, tokens in zip(owner.tolist(), new.tolist(), strict=True):
            longest[uid] = max(tokens, longest.get(uid, 0))
        for uid, tokens in longest.items():
            self._spent[uid] = self._spent.get(uid, 0) + tokens


def rescored(rows: Trajectories, policy: Policy) -> tuple[Trajectories, int]:
    """Replaces log-probs and entropies of tokens of older weights by those of `policy`; also returns their number."""
    stale = rows.versions_by_token().values < policy.version
    has_stale = rows.response_tokens.with_values(stale).sum() > 0
    if not bool(has_stale.any()):
        return rows, 0
    part = rows.select(has_stale)
    scores = policy.score(part.prompt_tokens, part.response_tokens, rows.temperature)
    stale_in_part = part.versions_by_token().values < policy.version  # the same tokens in the same order
    logprobs = rows.engine_logprobs.values.clone()
    logprobs[stale] = scores.logprobs.values[stale_in_part]
    entropies = rows.entropies.values.clone()
    entropies[stale] = scores.entropies.values[stale_in_part]
    changed = rows.replace(
        engine_logprobs=rows.engine_logprobs.with_values(logprobs), entropies=rows.entropies.with_values(entropies)
    )
    return changed, int(stale.sum())
