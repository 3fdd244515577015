"""Interventions: a failure's first wrong step is replaced, and what then stands there is learned as it is (InT)."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from creditgraph.components.expander.reset import reset_length
from creditgraph.components.rollouts.requests import (
    SamplingSettings,
    generate_where_room,
    keyed_seeds,
    sample_from_prefix,
)
from creditgraph.components.rollouts.second_turn import encoded, problem_of
from creditgraph.components.rollouts.thoughts import num_thoughts, steps_of, thought_texts
from creditgraph.components.text.stops import decode_rows
from creditgraph.components.text.templates import Mode, revise_prompt
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.handles import Policy, Requests, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Prompts, StepErrors, Trajectories, check_aligned
from creditgraph.pipeline.core.streams import keys_within


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Prefix and replacement of each kept intervention under the problem's own prompt, and credit 1 for its tokens."""

    trajectories: Trajectories
    credit: Annotated[Credit, same_rows("trajectories")]


class Intervene(Component):
    """Replaces the localised step h* of each failure; the prefix and the new step are supervised, nothing after them.

    The policy proposes the step itself. It continues the failure's thoughts 1 … h*−1 by one thought, being shown the
    whole attempt and the problem's reference solution (without one, the attempt alone) by the revising prompt.

    The result stands under the problem's own prompt, with log-probs scored there. A replacement that equals the wrong
    step or is empty is dropped, and so is one after which none of `continuations` responses is correct: the wrong step
    was another one, or the new one is no better. Both are counted. With objective `reinforce` credit 1 is supervised
    learning.

    Source: InT (2601.14209); that prefix and replacement are learned together is second-hand, the prompt and what is
    dropped are our reading. The paper goes on with reinforcement learning from the weights that this gives.
    """

    paper = "2601.14209"
    metrics = (
        Metric("sampled_tokens", "tokens", "tokens of proposed steps and of the responses that test them"),
        Metric("interventions", "rows", "failures whose step was replaced"),
        Metric("unchanged", "rows", "failures dropped, because the replacement was the wrong step again or empty"),
        Metric("failed", "rows", "failures dropped, because no response after the replacement was correct"),
        Metric("replacement_logprob", "nats", "log-prob of a replacement's token under the problem's prompt, mean"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling of proposed steps, and what is learned."""

        mode: Mode = "thought"
        """a step is a thought"""
        continuations: int = 4
        """responses after the new step of which one must be correct; 0 keeps every new step"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.continuations < 0:
                raise ValueError(f"expected continuations ≥ 0, got {self.continuations}.")
            if self.mode != "thought":
                raise ValueError(f"expected mode 'thought', whose steps can be replaced, got '{self.mode}'.")

    config: Config

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """The attempt and the reference solution, before a proposed step."""
        return 2

    def run(
        self,
        *,
        prompts: Prompts,
        failures: Trajectories,
        errors: Annotated[StepErrors, same_rows("failures")],
        policy: Policy,
        verifier: Verifier,
    ) -> Outputs:
        """Replaces one step of each failure."""
        check_aligned(failures, errors)
        prefix_length = reset_length(failures.thought_ends, errors.step)
        place = torch.minimum(errors.step, num_thoughts(failures)).clamp(min=1)
        wrong = failures.response_tokens.slice_rows(prefix_length, reset_length_after(failures, place))
        steps = self._propose(prompts, failures, prefix_length, policy) if len(failures) else wrong
        pairs = zip(steps.to_lists(), wrong.to_lists(), strict=True)
        changed = torch.tensor([bool(new) and new != old for new, old in pairs], dtype=torch.bool)
        tried = self._assemble(failures.select(changed), prefix_length[changed], steps.select(changed), policy)
        works, tested = self._works(prompts, tried, policy, verifier)
        made = _scored(tried.select(works), policy)
        tokens = made.response_tokens
        new = tokens.positions >= made.inherited[tokens.row_ids]
        self.context.log(
            sampled_tokens=Count(tested + len(steps.values)),
            interventions=Count(len(made)),
            unchanged=Count(len(failures) - len(tried)),
            failed=Count(len(tried) - len(made)),
            replacement_logprob=float(made.engine_logprobs.values[new].sum()) / max(int(new.sum()), 1),
        )
        credit = Credit(
            uid=made.uid,
            advantage=tokens.with_values(torch.ones(len(tokens.values))),
            mask=tokens.with_values(torch.ones(len(tokens.values), dtype=torch.bool)),
        )
        return Outputs(trajectories=made, credit=credit)

    def _propose(self, prompts: Prompts, failures: Trajectories, prefix_length: Tensor, policy: Policy) -> Jagged:
        attempts = thought_texts(failures, policy.tokenizer)
        texts = []
        for row, attempt in zip(prompts.index_of(failures.prompt_uid).tolist(), attempts, strict=True):
            reference = steps_of(prompts.solution[row]) or attempt
            texts.append(
                revise_prompt(*problem_of(prompts, row), attempt, reference, policy.tokenizer, self.config.mode)
            )
        prefix = failures.response_tokens.slice_rows(torch.zeros_like(prefix_length), prefix_length)
        sampling = self.config.sampling()
        requests = Requests(
            tokens=encoded(policy.tokenizer, texts).join(prefix),
            seed=keyed_seeds(self.context.rng(), keys_within(failures.prompt_uid), 0, 1).reshape(-1),
            sampling=sampling,
            max_tokens=sampling.max_tokens - prefix_length,
            max_thoughts=torch.ones_like(prefix_length),
            prompt_uid=failures.prompt_uid,
        )
        return generate_where_room(policy, requests).tokens

    def _assemble(self, parents: Trajectories, prefix_length: Tensor, steps: Jagged, policy: Policy) -> Trajectories:
        """Rows of prefix and step, under the problem's prompt; their log-probs are not known yet."""
        start = torch.zeros_like(prefix_length)
        tokens = parents.response_tokens.slice_rows(start, prefix_length).join(steps)
        before = (parents.thought_ends.values <= prefix_length[parents.thought_ends.row_ids]).to(torch.int64)
        ends = parents.thought_ends.slice_rows(start, parents.thought_ends.with_values(before).sum())
        last = Jagged.from_lengths(tokens.lengths.to(torch.int32), torch.ones_like(prefix_length))
        return parents.replace(
            uid=self.context.uids(len(parents)),
            parent=parents.uid.clone(),
            response_tokens=tokens,
            inherited=prefix_length.clone(),
            engine_logprobs=tokens.with_values(torch.zeros(len(tokens.values))),
            entropies=tokens.with_values(torch.zeros(len(tokens.values))),
            thought_ends=ends.join(last),
            policy_version=torch.full_like(prefix_length, policy.version),
            finish_reason=["stop"] * len(parents),
            text=decode_rows(policy.tokenizer, tokens.to_lists()),
            token_versions=None,
        )

    def _works(self, prompts: Prompts, tried: Trajectories, policy: Policy, verifier: Verifier) -> tuple[Tensor, int]:
        """bool [N], rows from which one of the continuations is correct; and the tokens that these took."""
        count = self.config.continuations
        if not count or not len(tried):
            return torch.ones(len(tried), dtype=torch.bool), 0
        limits = self.config.thoughts
        last = tried.thought_ends.offsets[1:] - 1
        begin = torch.where(
            tried.thought_ends.lengths > 1, tried.thought_ends.values[(last - 1).clamp(min=0)].long(), 0
        )
        steps = decode_rows(
            policy.tokenizer, tried.response_tokens.slice_rows(begin, tried.response_tokens.lengths).to_lists()
        )
        ended = torch.tensor([limits.final in step for step in steps])
        rows = (~ended).nonzero()[:, 0].repeat_interleave(count)
        parents = tried.select(rows)
        seed = keyed_seeds(self.context.rng(), keys_within(tried.prompt_uid), 1, count)[~ended].reshape(-1)
        length = parents.response_tokens.lengths
        uid = self.context.uids(len(rows))
        continued = sample_from_prefix(policy, parents, length, seed, self.config.sampling(), uid)
        verdicts = verifier.verify(prompts, Trajectories.concat([continued, tried.select(ended)]))
        right = torch.zeros(len(tried), dtype=torch.bool)
        right[torch.cat([rows, ended.nonzero()[:, 0]])[verdicts.correct & verdicts.valid]] = True
        return right, int((continued.response_tokens.lengths - continued.inherited).sum())


def _scored(made: Trajectories, policy: Policy) -> Trajectories:
    """With the log-probs and entropies that the policy gives these tokens after the problem's prompt."""
    if not len(made):
        return made
    scores = policy.score(made.prompt_tokens, made.response_tokens, made.temperature)
    return made.replace(engine_logprobs=scores.logprobs, entropies=scores.entropies)


def reset_length_after(trajectories: Trajectories, step: Tensor) -> Tensor:
    """int64 [N]: tokens in thoughts 1 … step of each row, all of a row without thoughts."""
    ends = trajectories.thought_ends
    length = trajectories.response_tokens.lengths.clone()
    has = ends.lengths > 0
    length[has] = ends.values[ends.offsets[:-1][has] + step[has] - 1].to(torch.int64)
    return length
