"""Code that runs in vLLM's workers: it installs `creditgraph.components.engine.vllm.exact`, and loads new weights."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel

from creditgraph.components.engine.vllm import exact
from creditgraph.components.engine.vllm.receive import Receiver, refresh_tied
from creditgraph.components.engine.weight_files import checksum_of


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


class WorkerExtension:
    """Methods that vLLM adds to its workers (`worker_extension_cls`); called through `collective_rpc`.

    Servers call them over HTTP, so arguments and results are JSON, but for tensors in this process.
    """

    model_runner: Any
    device: torch.device
    weight_transfer_engine: Any  # a Receiver, by the server's `weight_transfer_config`
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any
    reload_weights: Any
    list_loras: Any

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

    def creditgraph_begin(self) -> None:
        """Starts an update; one that was started and not finished is dropped."""
        with suppress(RuntimeError, ValueError):
            self.update_weights({})  # vLLM drops an update of which it could not take a part
        self.start_weight_update()

    def creditgraph_update(self, **part: Any) -> dict[str, Any]:
        """A whole update of one part (`creditgraph.components.engine.vllm.receive.Part`); returns the state after."""
        self.creditgraph_begin()
        self.update_weights(part)
        self.finish_weight_update()
        return self.creditgraph_state()

    def creditgraph_state(self) -> dict[str, Any]:
        """Version and checksum of the weights held (−1 and "" before the first); what is installed."""
        receiver = self.weight_transfer_engine
        receives = isinstance(receiver, Receiver)
        version, checksum = receiver.loaded if receives else (-1, "")
        installed = receives and exact.is_installed(self.model_runner)
        return {"version": version, "checksum": checksum, "installed": installed, "receives": receives}

    def creditgraph_restore(self) -> None:
        """Reloads the model's own weights from its files, if others were loaded; called before an adapter is added."""
        receiver = self.weight_transfer_engine
        receiver.loaded = (-1, "")
        receiver.drop()
        if not receiver.own:
            self.reload_weights()
            refresh_tied(self.model_runner.model)
            receiver.own = True

    def creditgraph_adapter(self, version: int) -> dict[str, Any]:
        """Returns the state after an adapter was added, with the checksum of the one that vLLM read last and holds."""
        held, checksum = WitnessedAdapter.last
        if held not in self.list_loras():
            raise RuntimeError("creditgraph: expected vLLM to hold the adapter that it read last, but it does not.")
        self.weight_transfer_engine.loaded = (version, checksum)
        return self.creditgraph_state()

    def creditgraph_free_bytes(self) -> int:
        """Free memory of this worker's GPU."""
        return int(torch.cuda.mem_get_info(self.device)[0])
