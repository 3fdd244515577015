"""Exact log-probs and entropies in vLLM's workers (0.32, 0.33): for GPUs with its V2 model runner, for CPUs with V1.

vLLM's own log-probs are either those before temperature or those after top-p and top-k truncation, and it reports no
entropies. The samplers here report both quantities of softmax(logits / temperature), before truncation: a request for
one log-prob in addition to the sampled token's gets minus the entropy instead, under an id that is not the sampled one.

The V2 runner draws with Gumbel noise hashed from (seed, position, token): all rows in one kernel, and a row's noise is
the same whatever else is decoded. The V1 runner has a generator per row, and a loop over them in every step.

Scores of prompts (`prompt_logprobs`) are computed only from the position `FIRST` on, which a request has in its
`extra_args`, so that everything before may come from the prefix cache; `scheduler.py` keeps cache
hits before it. vLLM's own `prompt_logprob_token_ids` would be another way, but it gives neither entropies nor other
temperatures than 1, and drops the scores of a row whose cached part goes beyond `prompt_logprob_start`.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler as GpuSampler

from creditgraph.components.engine.vllm.scheduler import first_scored, top_scored

_GREEDY = 1e-5  # vLLM samples greedily below this temperature
# Rows of logits at once: 39 MB in float32 for a vocabulary of 152 k, of which some copies are alive. vLLM does not know
# of them when it measures the memory that it leaves to the KV cache.
_ROWS = 64


def exact_table(logits: Tensor, temperature: Tensor | None, token_ids: Tensor, top: int = 0) -> LogprobsTensors:
    """Log-prob of each token, minus the entropy, and the `top` most likely tokens of softmax(logits / temperature).

    Args:
        logits: [N, V].
        temperature: [N], or None for 1; those of greedy rows (0) count as 1.
        token_ids: [N].

    Returns:
        2 + `top` columns [nats]: the token with its log-prob, another id with minus the entropy, the likeliest tokens.
    """
    token_ids = token_ids.long()
    values = logits.new_empty(len(logits), 2 + top, dtype=torch.float32)
    ids = torch.empty(values.shape, dtype=torch.int32, device=logits.device)
    ids[:, 0], ids[:, 1] = token_ids, (token_ids + 1) % logits.shape[1]
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        scaled = logits[rows].float()
        if temperature is not None:
            scaled = scaled / torch.where(temperature[rows] < _GREEDY, 1.0, temperature[rows])[:, None]
        logprobs = scaled.log_softmax(-1)
        values[rows, 0] = logprobs.gather(1, token_ids[rows, None])[:, 0]
        values[rows, 1] = (logprobs.exp() * logprobs).nansum(-1)
        if top:
            values[rows, 2:], ids[rows, 2:] = logprobs.topk(top)
    # The output must have ranks, but nobody uses them and computing them costs a pass over the vocabulary.
    return LogprobsTensors(ids, values, torch.ones_like(token_ids))


class ExactSampler(Sampler):  # type: ignore[misc]
    """The V1 runner's sampler with exact log-probs and entropies.

    Args:
        base: the runner's sampler, which still draws the tokens.
        forbidden: bool [V], columns that are no token and never drawn (they stay in the softmax), or None.
    """

    def __init__(self, base: Any, forbidden: Tensor | None) -> None:
        super().__init__(base.logprobs_mode, base.use_fp64_gumbel)
        self.topk_topp_sampler = base.topk_topp_sampler
        self.forbidden = forbidden

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Draws a token per row; logits [B, V]."""
        # vLLM divides by the temperature in place, so ours must come from another tensor.
        drawn = logits.clone() if self.forbidden is None else logits.masked_fill(self.forbidden, -torch.inf)
        plain = dataclasses.replace(sampling_metadata, max_num_logprobs=None)
        out = super().forward(drawn, plain, *args, **kwargs)
        if sampling_metadata.max_num_logprobs is not None:
            out.logprobs_tensors = exact_table(logits, sampling_metadata.temperature, out.sampled_token_ids[:, 0])
        return out


class ExactGpuSampler(GpuSampler):  # type: ignore[misc]
    """The V2 runner's sampler with exact log-probs and entropies; arguments as those of `ExactSampler`."""

    def __init__(self, base: Any, forbidden: Tensor | None) -> None:
        self.__dict__.update(vars(base))  # its buffers hold the requests' settings
        self.forbidden = forbidden
        self._drawing = False

    def get_logprobs_dims(self, *args: Any, **kwargs: Any) -> tuple[int, int] | None:
        """The base's, but None while it draws, so that it computes no log-probs."""
        dims: tuple[int, int] | None = None if self._drawing else super().get_logprobs_dims(*args, **kwargs)
        return dims

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        """Draws a token per row; logits [B, V]."""
        wanted = self.get_logprobs_dims(input_batch.idx_mapping_np) is not None
        drawn = logits if self.forbidden is None else logits.masked_fill(self.forbidden, -torch.inf)
        self._drawing = True
        try:
            out = super().__call__(drawn, input_batch)
        finally:
            self._drawing = False
        if wanted:
            temperature = self.sampling_states.temperature.gpu[input_batch.expanded_idx_mapping]
            out.logprobs_tensors = exact_table(logits, temperature, out.sampled_token_ids[:, 0])
        return out


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Chunk:
    """The part of a scored prompt that one step passes through the model.

    Attributes:
        name: id of the request.
        first: position whose next token is the first to score.
        temperature: of the softmax.
        top: number of the most likely tokens to score in each place.
        tokens: ids of the whole prompt, [length] or more.
        length: tokens of the prompt.
        start, end: positions that the step passes through the model.
        row: row of position `start` in the step's hidden states.
    """

    name: str
    first: int
    temperature: float
    top: int
    tokens: Tensor
    length: int
    start: int
    end: int
    row: int


class PromptScores:
    """Exact log-probs and entropies of scored prompts, collected over the steps of their prefill."""

    def __init__(self) -> None:
        self._parts: dict[str, list[LogprobsTensors]] = {}

    def step(
        self, chunks: Sequence[Chunk], hidden_states: Tensor, compute_logits: Callable[[Tensor], Tensor]
    ) -> dict[str, LogprobsTensors]:
        """The tables (`exact_table`, a row per scored token) of the prompts that end in this step."""
        spans = [(max(c.first, c.start), max(c.first, c.start, min(c.end, c.length - 1))) for c in chunks]
        rows = [torch.arange(low, high) + (c.row - c.start) for c, (low, high) in zip(chunks, spans, strict=True)]
        ids = [c.tokens[low + 1 : high + 1] for c, (low, high) in zip(chunks, spans, strict=True)]
        counts = [high - low for low, high in spans]
        temperatures = torch.tensor([c.temperature for c in chunks]).repeat_interleave(torch.tensor(counts))
        top = max(c.top for c in chunks)
        tables = self._tables(torch.cat(rows), torch.cat(ids), temperatures, top, hidden_states, compute_logits)
        done: dict[str, LogprobsTensors] = {}
        at = 0
        for chunk, count in zip(chunks, counts, strict=True):
            parts = self._parts.setdefault(chunk.name, [])
            if chunk.start <= chunk.first:
                parts.clear()  # of a prefill that was broken off
            token_ids, values, ranks = (column[at : at + count] for column in tables)
            parts.append(LogprobsTensors(token_ids[:, : 2 + chunk.top], values[:, : 2 + chunk.top], ranks))
            at += count
            if chunk.end >= chunk.length:
                columns = zip(*(part[:3] for part in self._parts.pop(chunk.name)), strict=True)
                done[chunk.name] = LogprobsTensors(*(torch.cat(column) for column in columns))
        return done

    def forget(self, name: str) -> None:
        """Drops what was collected for a request."""
        self._parts.pop(name, None)

    @staticmethod
    def _tables(
        rows: Tensor,
        ids: Tensor,
        temperatures: Tensor,
        top: int,
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not len(rows):  # no collective operation for nothing
            nothing = hidden.new_zeros(0, 2 + top, dtype=torch.float32)
            return nothing.to(torch.int32), nothing, ids.long()
        rows, temperatures = rows.to(hidden.device), temperatures.to(hidden.device)
        tables = [
            exact_table(compute_logits(hidden[some]), temperature, tokens, top)
            for some, temperature, tokens in zip(
                torch.split(rows, _ROWS), torch.split(temperatures, _ROWS), torch.split(ids, _ROWS), strict=True
            )
        ]
        ids, values, ranks = (torch.cat(column) for column in zip(*(table[:3] for table in tables), strict=True))
        return ids, values, ranks


class ExactPromptWorker(PromptLogprobsWorker):  # type: ignore[misc]
    """Scores prompts in the V2 runner; `base` is the runner's own worker for it."""

    def __init__(self, base: Any) -> None:
        self.__dict__.update(vars(base))
        self._scores = PromptScores()
        self._wanted: dict[str, Any] = {}  # sampling parameters

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        """Takes a request's settings."""
        super().add_request(req_id, req_idx, sampling_params)
        if sampling_params.prompt_logprobs is not None:
            self._wanted[req_id] = sampling_params

    def remove_request(self, req_id: str) -> None:
        """Forgets a request."""
        super().remove_request(req_id)
        self._wanted.pop(req_id, None)
        self._scores.forget(req_id)

    def compute_prompt_logprobs(
        self,
        logits_fn: Callable[[Tensor], Tensor],
        hidden_states: Tensor,
        input_batch: Any,
        all_token_ids: Tensor,
        num_computed_tokens: Tensor,
        prompt_lens: Any,
    ) -> dict[str, LogprobsTensors]:
        """The tables of the prompts that end in this step."""
        chunks = []
        for n, name in enumerate(input_batch.req_ids):
            wanted = self._wanted.get(name)
            index = int(input_batch.idx_mapping_np[n])
            length = int(prompt_lens[index])
            start = int(input_batch.num_computed_prefill_tokens_np[n])
            # Those that are sampled already have had their scores.
            if wanted is None or start >= length or length < input_batch.prefill_len_np[n]:
                continue
            chunk = Chunk(
                name=name,
                first=first_scored(wanted) or 0,
                temperature=wanted.temperature,
                top=top_scored(wanted),
                tokens=all_token_ids[index],
                length=length,
                start=start,
                end=start + int(input_batch.num_scheduled_tokens[n]),
                row=int(input_batch.query_start_loc_np[n]),
            )
            chunks.append(chunk)
        return self._scores.step(chunks, hidden_states, logits_fn) if chunks else {}


def install(runner: Any, forbidden: Tensor | None) -> None:
    """Replaces the sampler and the scoring of vLLM's model runner, of either version.

    Raises RuntimeError for a runner whose sampler is not vLLM's own.
    """
    if type(runner.sampler) is GpuSampler:
        runner.sampler = ExactGpuSampler(runner.sampler, forbidden)
        runner.prompt_logprobs_worker = ExactPromptWorker(runner.prompt_logprobs_worker)
    elif type(runner.sampler) is Sampler and hasattr(runner, "_get_prompt_logprobs_dict"):
        runner.sampler = ExactSampler(runner.sampler, forbidden)
        runner.creditgraph_scores = PromptScores()
        runner._get_prompt_logprobs_dict = types.MethodType(_scores_of_v1, runner)
    else:
        kind = f"{type(runner.sampler).__module__}.{type(runner.sampler).__qualname__}"
        raise RuntimeError(f"creditgraph: expected vLLM's own sampler in its model runner, got {kind}.")


def is_installed(runner: Any) -> bool:
    """Whether `install` was called."""
    return isinstance(runner.sampler, ExactSampler | ExactGpuSampler)


def _scores_of_v1(
    runner: Any, hidden_states: Tensor, num_scheduled_tokens: Mapping[str, int]
) -> dict[str, LogprobsTensors]:
    """`GPUModelRunner._get_prompt_logprobs_dict` of the V1 runner."""
    chunks = []
    for name in list(runner.num_prompt_logprobs):
        request = runner.requests.get(name)
        if request is None or name not in num_scheduled_tokens:
            continue
        index = runner.input_batch.req_id_to_index[name]
        chunk = Chunk(
            name=name,
            first=first_scored(request.sampling_params) or 0,
            temperature=request.sampling_params.temperature,
            top=top_scored(request.sampling_params),
            tokens=torch.tensor(request.prompt_token_ids, device=hidden_states.device),
            length=len(request.prompt_token_ids),
            start=request.num_computed_tokens,
            end=request.num_computed_tokens + num_scheduled_tokens[name],
            row=int(runner.query_start_loc.np[index]),
        )
        chunks.append(chunk)
    done: dict[str, LogprobsTensors] = {}
    if chunks:
        done = runner.creditgraph_scores.step(chunks, hidden_states, runner.model.compute_logits)
    for name in done:
        del runner.num_prompt_logprobs[name]
    if done:
        runner._sync_device()
    return done
