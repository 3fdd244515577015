"""The model and the reward functions of TRL's trainer, for the nodes of a graph that score, sample and verify.

The trainer of ms-swift scores with the same policy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import trl
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer
from trl.data_utils import is_conversational

from creditgraph.adapters.rows import place_of, verdicts
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.handles import Completions, Policy, Requests, Scores, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories

BRANCHES = 1024
"""tokens of branches that a trunk has at a time, which bounds logits and mask"""


def shared(trainer: GRPOTrainer, rows: Sequence[Any], work: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """`work` on `rows`, one result each, of which every process does as many: some models are spread over all."""
    if not rows:
        return []
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    filled = [*rows, *[rows[-1]] * (-len(rows) % ranks)]
    found: list[Any] = gather_object(work(filled[rank::ranks]))  # those of the first process come first
    return [found[i % ranks * len(found) // ranks + i // ranks] for i in range(len(rows))]


def at_a_time(trainer: GRPOTrainer) -> int:
    """Rows that a process samples and rewards at a time when the trainer makes a batch."""
    return int(trainer.args.generation_batch_size) // int(trainer.accelerator.num_processes)


def check_continues(trainer: GRPOTrainer, place: str) -> None:
    """Raises ConfigError where the responses of the trainer cannot be continued from the middle."""
    turns = [name for name in ("tools", "environment_factories", "rollout_func") if getattr(trainer, name, None)]
    if turns:
        raise ConfigError(
            f"{place}: it continues responses from the middle, but with {', '.join(turns)} what follows is not up to "
            "the model alone. Choose a graph that samples nothing."
        )
    if not {"prompt_ids", "num_generations"} <= set(inspect.signature(trainer._generate_single_turn).parameters):
        raise ConfigError(f"{place}: it continues responses, which takes TRL 1.15 or newer; got {trl.__version__}.")


class TrainerPolicy(Policy):
    """The model that the trainer trains: it scores as in the trainer's loss and samples as the trainer does.

    Draws are torch's or vLLM's, not those of the requests' seeds.

    Args:
        trainer: of TRL or ms-swift.
        scores_sampled: whether what it samples has log-probs and entropies, which takes one more forward pass.
    """

    version = 0

    def __init__(self, trainer: Any, scores_sampled: bool = False) -> None:
        self.trainer, self.scores_sampled = trainer, scores_sampled
        self._takes_masks: bool | None = None

    @property
    def tokenizer(self) -> Any:
        """The trainer's."""
        return getattr(self.trainer.processing_class, "tokenizer", self.trainer.processing_class)

    def generate(self, requests: Requests) -> Completions:
        """Continues each row as the trainer samples; of the requests only temperature and budgets count."""
        rows, sampling = requests.tokens.to_lists(), requests.sampling
        most = torch.full((len(rows),), sampling.max_tokens) if requests.max_tokens is None else requests.max_tokens
        budgets = most.tolist()
        # Rows of one budget share a batch.
        order = sorted(range(len(rows)), key=lambda i: budgets[i])
        given = (sampling.temperature, max(budgets, default=1))
        sampled = shared(
            self.trainer, [(rows[i], budgets[i]) for i in order], lambda part: self._generate(part, *given)
        )
        kept: list[list[int]] = [[] for _ in rows]
        known: list[list[float]] = [[] for _ in rows]
        for i, (ids, logprobs) in zip(order, sampled, strict=True):
            kept[i], known[i] = ids[: budgets[i]], logprobs[: budgets[i]]
        tokens = Jagged.from_rows(kept, torch.int32)
        logprobs = Jagged.from_rows(known, torch.float32)
        entropies = tokens.with_values(torch.full_like(logprobs.values, torch.nan))
        if self.scores_sampled and len(tokens.values):
            scores = self.score(requests.tokens, tokens, self.trainer.temperature)
            values = logprobs.values.where(logprobs.values.isfinite(), scores.logprobs.values)
            logprobs, entropies = logprobs.with_values(values), scores.entropies
        ends = {self.tokenizer.eos_token_id, *(getattr(self.trainer, "eos_token_ids", None) or ())}
        ended = [bool(row) and row[-1] in ends for row in kept]
        return Completions(
            tokens=tokens,
            logprobs=logprobs,
            entropies=entropies,
            thought_ends=Jagged.from_rows([[] for _ in kept], torch.int32),
            finish_reason=["eos" if e else "length" for e in ended],
            text=self.tokenizer.batch_decode(kept),
        )

    @contextmanager
    def _sampling(self, temperature: float, longest: int) -> Iterator[None]:
        """Sets sampling settings of the trainer for a while."""
        trainer = self.trainer
        holder = trainer.vllm_generation if trainer.use_vllm else trainer.generation_config
        given: dict[str, Any] = {"temperature": temperature}
        given["max_completion_length" if trainer.use_vllm else "max_new_tokens"] = longest
        if not temperature and not trainer.use_vllm:  # transformers takes no temperature of 0
            given |= {"temperature": 1.0, "do_sample": False}
        before = {name: getattr(holder, name) for name in given}
        vars(holder).update(given)
        try:
            yield
        finally:
            vars(holder).update(before)

    def _generate(
        self, rows: Sequence[tuple[list[int], int]], temperature: float, longest: int
    ) -> list[tuple[list[int], list[float]]]:
        """Continuations of rows of tokens, at least as long as their budgets let them be, and their log-probs."""
        trainer, found = self.trainer, list[tuple[list[int], list[float]]]()
        size = len(rows) if trainer.use_vllm else at_a_time(trainer)
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            # A server of vLLM has one limit for the rows of all processes.
            most = longest if trainer.use_vllm else max(budget for _, budget in part)
            with self._sampling(temperature, most):
                ids, logprobs = trainer._generate_single_turn([tokens for tokens, _ in part], None, {}, 1)
            known = [[torch.nan] * len(row) for row in ids] if logprobs is None else logprobs
            found += [
                (list(row), [torch.nan if x is None else x for x in numbers])
                for row, numbers in zip(ids, known, strict=True)
            ]
        return found

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """See `Policy.score`; at the trainer's temperature, and without further tokens."""
        self._check_asked(temperature, top)
        return _scores(
            tokens, shared(self.trainer, list(zip(context.to_lists(), tokens.to_lists(), strict=True)), self._score)
        )

    def _check_asked(self, temperature: float, top: int) -> None:
        if temperature != self.trainer.temperature or top:
            raise RunError(
                f"the trainer's model: asked for log-probs at temperature {temperature:g} and {top} further tokens; "
                f"expected its own temperature of {self.trainer.temperature:g} and none. Choose another graph."
            )

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[list[list[float]]]:
        """Log-prob and entropy of each token of each pair of context and tokens; Unsloth has no entropies."""
        trainer, size = self.trainer, self.trainer.args.per_device_train_batch_size
        lengths = [len(tokens) for _, tokens in pairs]
        if getattr(trainer, "_unsloth", False):  # it moves contexts to the left, so none may have padding there
            pairs = [(context[:1], [*context[1:], *tokens]) for context, tokens in pairs]
        # Rows of one length share a batch; one without tokens has its place too, as all processes need as many.
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        found: list[list[list[float]]] = [[] for _ in pairs]
        for first in range(0, len(pairs), size):
            part = order[first : first + size]
            # As TRL pads them: contexts on the left, so that the head runs for few places.
            before = Jagged.from_rows([pairs[i][0][::-1] for i in part], torch.int64)
            after = Jagged.from_rows([pairs[i][1] or [0] for i in part], torch.int64)
            inputs = {
                "prompt_ids": before.to_padded().flip(1),
                "prompt_mask": _ones(before).flip(1),
                "completion_ids": after.to_padded(),
                "completion_mask": _ones(after),
            }
            inputs = {name: x.to(trainer.accelerator.device) for name, x in inputs.items()}
            logprobs, entropies, _ = trainer._score(trainer.model, inputs)
            entropies = torch.full_like(logprobs, torch.nan) if entropies is None else entropies
            rows = torch.stack([logprobs.float(), entropies.float()], dim=2).tolist()
            for i, row in zip(part, rows, strict=True):
                found[i] = row[: len(pairs[i][1])][len(pairs[i][1]) - lengths[i] :]
        return found

    def score_branches(
        self, trunk: Jagged, row: Tensor, at: Tensor, tokens: Jagged, temperature: float = 1.0
    ) -> Scores:
        """A trunk runs once for its branches, where the model's attention takes a mask; else see `Policy`."""
        if self._takes_masks is None and len(tokens.values):
            first = (tokens.lengths > 0).nonzero()[:8, 0]
            given = (trunk, row[first], at[first], tokens.select(first), temperature)
            self._takes_masks = self._may_take_masks and self._agrees(*given)
        scored = self._packed if self._takes_masks else super().score_branches
        return scored(trunk, row, at, tokens, temperature)

    def _agrees(self, *given: Any) -> bool:
        packed, plain = (score(*given).logprobs.values for score in (self._packed, super().score_branches))
        # bfloat16 keeps 8 bits, so another order of sums moves a log-prob by hundredths.
        return bool((packed - plain).abs().mean() <= 0.05)

    @property
    def _may_take_masks(self) -> bool:
        """Whether every layer sees all that the mask lets it see."""
        model = self.trainer.model
        config, text = model.config, model.config.get_text_config()
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # without adapters of peft
        full = set(getattr(text, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        full &= getattr(text, "sliding_window", None) is None
        masked = config._attn_implementation in ("sdpa", "eager") and not getattr(self.trainer, "_unsloth", False)
        return bool(full and masked and "logits_to_keep" in inspect.signature(type(plain).forward).parameters)

    def _packed(self, trunk: Jagged, row: Tensor, at: Tensor, tokens: Jagged, temperature: float) -> Scores:
        self._check_asked(temperature, 0)
        rows, after, starts = trunk.to_lists(), tokens.to_lists(), at.tolist()
        parts: list[list[int]] = []
        used = [b for b in torch.argsort(row, stable=True).tolist() if after[b]]
        for b in used:
            size = sum(len(after[other]) for other in parts[-1]) if parts else BRANCHES
            if not parts or int(row[parts[-1][0]]) != int(row[b]) or size + len(after[b]) > BRANCHES:
                parts.append([])
            parts[-1].append(b)
        given = [(rows[int(row[part[0]])], [(starts[b], after[b]) for b in part]) for part in parts]
        found = shared(self.trainer, given, lambda mine: [self._branched(*one) for one in mine])
        scored = dict(zip(used, (numbers for one in found for numbers in one), strict=True))
        return _scores(tokens, [scored.get(b, []) for b in range(len(after))])

    @torch.no_grad()
    def _branched(self, trunk: list[int], branches: list[tuple[int, list[int]]]) -> list[list[list[float]]]:
        """Log-prob and entropy of each token of branches (tokens of the trunk before it, its own tokens)."""
        trainer, device = self.trainer, self.trainer.accelerator.device
        reach = max(at for at, _ in branches)
        ids, positions = trunk[:reach], list(range(reach))
        seen = torch.ones(reach, reach, dtype=torch.bool).tril()
        predicting: list[int] = []
        for at, tokens in branches:
            inner, begin = tokens[:-1], len(ids)
            predicting += [at - 1, *range(begin, begin + len(inner))]
            ids, positions = ids + inner, positions + list(range(at, at + len(inner)))
            own = torch.ones(len(inner), len(inner), dtype=torch.bool).tril()
            before = (torch.arange(begin) < at).expand(len(inner), -1)
            seen = torch.cat([torch.nn.functional.pad(seen, (0, len(inner))), torch.cat([before, own], dim=1)])
        dtype = next(trainer.model.parameters()).dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min).to(device)
        with trainer.accelerator.autocast():
            logits = trainer.model(
                input_ids=torch.tensor([ids], device=device),
                attention_mask=mask[None, None],
                position_ids=torch.tensor([positions], device=device),
                logits_to_keep=torch.tensor(predicting, device=device),
                use_cache=False,
            ).logits[0]
        logprobs = (logits.float() / trainer.temperature).log_softmax(1)
        scored = torch.tensor([t for _, tokens in branches for t in tokens], device=device)
        own = logprobs.gather(1, scored[:, None])[:, 0]
        numbers = torch.stack([own, -(logprobs.exp() * logprobs).sum(1)], dim=1).tolist()
        ends = list(accumulate(len(tokens) for _, tokens in branches))
        return [numbers[end - len(tokens) : end] for end, (_, tokens) in zip(ends, branches, strict=True)]


def _scores(tokens: Jagged, found: Sequence[Sequence[Sequence[float]]]) -> Scores:
    """Of log-prob and entropy of each token of each row."""
    flat = torch.tensor([x for row in found for x in row], dtype=torch.float32).view(-1, 2)
    return Scores(logprobs=tokens.with_values(flat[:, 0]), entropies=tokens.with_values(flat[:, 1]))


def _ones(rows: Jagged) -> Tensor:
    return rows.with_values(torch.ones_like(rows.values)).to_padded()


class TrainerRewards(Verifier):
    """The trainer's reward functions, on texts that continue its responses.

    Attributes:
        rows: the rows of the dataset, one per prompt, whose place ends its uid (`place_of`).
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.rows: list[dict[str, Any]] = []

    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        """TRL's weighted sum of its reward functions; invalid where all of them return None."""
        rows = place_of(trajectories.prompt_uid).tolist()
        tokens = (trajectories.prompt_tokens.to_lists(), trajectories.response_tokens.to_lists())
        rewards = shared(self.trainer, list(zip(rows, *tokens, strict=True)), self._rewards)
        right_above = self.trainer.credit.right_above
        return verdicts(trajectories.uid, rewards, right_above, "no reward function returned a number")

    def _rewards(self, given: Sequence[tuple[int, list[int], list[int]]]) -> list[float]:
        """Rewards of (row of the dataset, tokens of the prompt, tokens of the response)."""
        size = at_a_time(self.trainer)
        return [x for first in range(0, len(given), size) for x in self._rewards_of(given[first : first + size])]

    def _rewards_of(self, given: Sequence[tuple[int, list[int], list[int]]]) -> list[float]:
        trainer = self.trainer
        inputs = [self.rows[row] for row, _, _ in given]
        prompts, tokens = [row["prompt"] for row in inputs], [ids for _, _, ids in given]
        completions = self._completions(prompts[0], given)
        per_function = GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, tokens)
        # What functions log is for the table of the batch's own responses.
        trainer._pending_extra_logs.clear()
        trainer._pending_metrics.clear()
        first = trainer.accelerator.process_index * len(given)
        rewards: list[float] = trainer._weighted(per_function)[first : first + len(given)].tolist()
        return rewards

    def _completions(self, prompt: Any, given: Sequence[tuple[int, list[int], list[int]]]) -> list[Any]:
        """As TRL passes them to reward functions: texts, or messages of conversations."""
        trainer = self.trainer
        texts = list(trainer.processing_class.batch_decode([ids for _, _, ids in given], skip_special_tokens=True))
        if not is_conversational({"prompt": prompt}):
            return texts
        tokenizer = trainer._policy.tokenizer
        if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
            from trl.chat_template_utils import parse_response

            return [[parse_response(tokenizer, ids, prefix=before)] for _, before, ids in given]
        return [[{"role": "assistant", "content": text}] for text in texts]
