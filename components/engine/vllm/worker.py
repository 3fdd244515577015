"""Code that runs in vLLM's workers: it installs `creditgraph.components.engine.vllm.exact`, and loads new weights."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel

from creditgraph.components.engine.vllm import exact
from creditgraph.components.engine.vllm.receive import Receiver, refresh_tied
from creditgraph.components.engine.weight_files import Checksum, checksum_of, wait_for
from creditgraph.components.models.weights import read_file


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
        """Installs the samplers of `creditgraph.components.engine.vllm.exact`; `forbidden` ids are never drawn."""
        runner = self.model_runner
        mask = None
        if forbidden:
            mask = torch.zeros(runner.model_config.get_vocab_size(), dtype=torch.bool)
            mask[list(forbidden)] = True
            mask = mask.to(runner.device)
        exact.install(runner, mask)
        if getattr(runner, "lora_manager", None) is not None:
            runner.lora_manager._lora_model_cls = WitnessedAdapter

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
        return {"version": version, "checksum": checksum, "installed": exact.is_installed(self.model_runner)}

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
