"""Code that runs in vLLM's workers: log-probs and entropies of the sampling distribution, and loading of new weights.

vLLM's own log-probs are either those before temperature or those after top-p and top-k truncation, and it reports no
entropies. `ExactSampler` gives both quantities of softmax(logits / temperature), before truncation, for sampled and for
prompt tokens. A request for one log-prob in addition to the sampled token's gets minus the entropy instead,
under an id that is not the sampled one (or for two: over HTTP, vLLM counts the sampled token's own among them). Written
for the model runner of vLLM 0.32 that `VLLM_USE_V2_MODEL_RUNNER=0` chooses.
"""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from components.engine.vllm.receive import Receiver, refresh_tied
from components.engine.weight_files import Checksum, checksum_of, wait_for
from components.models.weights import read_file

_GREEDY = 1e-5  # vLLM samples greedily below this temperature


class ExactSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler, with log-probs and entropies at the sampling temperature and before truncation.

    Args:
        base: the runner's sampler, which still draws the tokens.
        forbidden: bool [V], columns that are no token and never drawn (they stay in the softmax), or None.
    """

    def __init__(self, base: Any, forbidden: Tensor | None) -> None:
        super().__init__(base.logprobs_mode, base.use_fp64_gumbel)
        self.topk_topp_sampler = base.topk_topp_sampler
        self.forbidden = forbidden
        self.scoring_temperature = 1.0

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Draws a token per row; logits [B, V]."""
        count = sampling_metadata.max_num_logprobs
        logprobs = None if count is None else self._logprobs(logits, sampling_metadata.temperature)
        if self.forbidden is not None:
            logits = logits.masked_fill(self.forbidden, -torch.inf)
        plain = dataclasses.replace(sampling_metadata, max_num_logprobs=None)
        out = super().forward(logits, plain, *args, **kwargs)
        if logprobs is not None:
            out.logprobs_tensors = self.gather_logprobs(logprobs, count, out.sampled_token_ids[:, 0].long())
        return out

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Log-probs of prompt tokens, [T, V], at the temperature of the request that is being scored."""
        return (logits.float() / self.scoring_temperature).log_softmax(-1)

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Log-prob of each token, [T], and minus the entropy as a second column if one or two are requested."""
        if num_logprobs > 2:
            return super().gather_logprobs(logprobs, num_logprobs, token_ids)
        ids = [token_ids]
        values = [logprobs.gather(1, token_ids[:, None])[:, 0]]
        if num_logprobs:
            ids.append((token_ids + 1) % logprobs.shape[1])
            values.append((logprobs.exp() * logprobs).nansum(-1))
        # The output must have ranks, but nobody uses them and computing them costs a pass over the vocabulary.
        return LogprobsTensors(torch.stack(ids, 1).to(torch.int32), torch.stack(values, 1), torch.ones_like(token_ids))

    @staticmethod
    def _logprobs(logits: Tensor, temperature: Tensor | None) -> Tensor:
        scaled = logits.float()
        if temperature is not None:
            scaled = scaled / torch.where(temperature < _GREEDY, 1.0, temperature)[:, None]
        return scaled.log_softmax(-1)


class WitnessedAdapter(LoRAModel):  # type: ignore[misc]
    """vLLM's adapter, which records its id and the checksum of the tensors that it was last made of.

    Attributes:
        last: id and checksum of all tensors, as they were read from the file.
    """

    last: ClassVar[tuple[int, str]] = (0, "")

    @classmethod
    def from_lora_tensors(cls, lora_model_id: int, tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Makes an adapter of PEFT's tensors."""
        # Before vLLM scales some of them in place.
        WitnessedAdapter.last = (lora_model_id, checksum_of(tensors))
        return super().from_lora_tensors(lora_model_id, tensors, *args, **kwargs)


class WorkerExtension(Receiver):
    """Methods that vLLM adds to its workers (`worker_extension_cls`); called through `collective_rpc`.

    Servers call them over HTTP, so arguments and results are JSON, but for `creditgraph_load`.
    """

    reload_weights: Any
    list_loras: Any
    creditgraph_loaded: tuple[int, str] = (-1, "")  # version and checksum
    creditgraph_own: bool = True  # whether it holds the model's own weights, on which adapters build

    def creditgraph_install(self, forbidden: Sequence[int]) -> None:
        """Installs `ExactSampler`; `forbidden` ids are never drawn."""
        runner = self.model_runner
        if not hasattr(runner, "_get_prompt_logprobs_dict"):
            raise RuntimeError("creditgraph: expected the model runner of VLLM_USE_V2_MODEL_RUNNER=0, got another one.")
        mask = None
        if forbidden:
            mask = torch.zeros(runner.model_config.get_vocab_size(), dtype=torch.bool)
            mask[list(forbidden)] = True
            mask = mask.to(runner.device)
        runner.sampler = ExactSampler(runner.sampler, mask)
        prompt_logprobs = runner._get_prompt_logprobs_dict
        if getattr(runner, "lora_manager", None) is not None:
            runner.lora_manager._lora_model_cls = WitnessedAdapter

        def each_at_its_temperature(runner: Any, *args: Any) -> dict[str, Any]:
            waiting = runner.num_prompt_logprobs
            tables: dict[str, Any] = {}
            for request in list(waiting):
                runner.num_prompt_logprobs = {request: waiting[request]}
                if request in runner.requests:
                    runner.sampler.scoring_temperature = runner.requests[request].sampling_params.temperature or 1.0
                tables.update(prompt_logprobs(*args))
                if request not in runner.num_prompt_logprobs:
                    del waiting[request]
            runner.num_prompt_logprobs = waiting
            return tables

        runner._get_prompt_logprobs_dict = types.MethodType(each_at_its_temperature, runner)

    def creditgraph_load(self, version: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Loads Hugging Face tensors; returns the state after it, with the checksum of all of them."""
        return self._creditgraph_load(version, iter(tensors.items()))

    def creditgraph_load_files(self, version: int, files: Sequence[str], wait_seconds: float) -> dict[str, Any]:
        """Loads safetensors files, each as soon as it exists, within `wait_seconds`; returns the state after it."""
        deadline = time.monotonic() + wait_seconds

        def pairs() -> Iterator[tuple[str, Tensor]]:
            for file in files:
                wait_for(file, deadline)
                yield from read_file(file)

        return self._creditgraph_load(version, pairs())

    def _creditgraph_load(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Any]:
        self.creditgraph_loaded = (-1, "")  # until the last tensor is loaded
        checksum = Checksum()
        forms: dict[str, tuple[Any, ...]] = {}

        def passing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                forms[name] = (tensor.shape, tensor.dtype)
                checksum.add(name, tensor)
                yield name, tensor

        self.creditgraph_reload(passing())
        # Tensors that the engine holds under the same name and form are the better evidence; fused and packed ones are
        # not kept under their names.
        for name, parameter in self.model_runner.model.named_parameters():
            if forms.get(name) == (parameter.shape, parameter.dtype):
                checksum.add(name, parameter.data)
        self.creditgraph_loaded = (version, checksum.result())
        return self.creditgraph_state()

    def creditgraph_state(self) -> dict[str, Any]:
        """Version and checksum of the weights held (−1 and "" before the first); whether the sampler is installed."""
        version, checksum = self.creditgraph_loaded
        installed = isinstance(self.model_runner.sampler, ExactSampler)
        return {"version": version, "checksum": checksum, "installed": installed}

    def creditgraph_reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Loads (name, tensor) pairs layer by layer: on CPUs linear layers keep a packed copy and no parameter."""
        self.creditgraph_own = False
        self.reload_weights(weights_iterator=tensors)
        refresh_tied(self.model_runner.model)

    def creditgraph_restore(self) -> None:
        """Reloads the model's own weights from its files, if others were loaded; called before an adapter is added."""
        self.creditgraph_loaded = (-1, "")
        if not self.creditgraph_own:
            self.reload_weights()
            refresh_tied(self.model_runner.model)
            self.creditgraph_own = True

    def creditgraph_adapter(self, version: int) -> dict[str, Any]:
        """Returns the state after an adapter was added, with the checksum of the one that vLLM read last and holds."""
        held, checksum = WitnessedAdapter.last
        if held not in self.list_loras():
            raise RuntimeError("creditgraph: expected vLLM to hold the adapter that it read last, but it does not.")
        self.creditgraph_loaded = (version, checksum)
        return self.creditgraph_state()
