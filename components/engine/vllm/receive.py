"""Code that runs in vLLM's workers: new weights that come in buckets, by broadcast or from shared memory.

A version is begun, taken bucket by bucket and ended, as vLLM's own transfer engines do (`vllm.distributed.
weight_transfer`): they reload layer by layer between `initialize_layerwise_reload` and `finalize_layerwise_reload`.
vLLM's engines need NCCL; here the group may be gloo's too, and a checksum of what has arrived is kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.engine.bucket import Form, cut, open_shared, size_of
from creditgraph.components.engine.group import Meeting, UpdateGroup
from creditgraph.components.engine.weight_files import Checksum


class Receiver:
    """Methods of the worker extension for weights in buckets; called over HTTP, so arguments and results are JSON."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device
    rank: int
    creditgraph_loaded: tuple[int, str]
    creditgraph_own: bool
    creditgraph_group: UpdateGroup | None = None
    creditgraph_coming: tuple[int, Checksum] | None = None

    def creditgraph_join(self, meeting: Mapping[str, Any], first: int) -> None:
        """Joins the group of a transfer as rank `first` plus this worker's, and leaves the one before."""
        if self.creditgraph_group is not None:
            self.creditgraph_group.close()
            self.creditgraph_group = None
        self.creditgraph_group = UpdateGroup(Meeting(**meeting), first + self.rank, self.device)

    def creditgraph_begin(self, version: int) -> None:
        """Prepares the model for new weights; a version that was begun and not ended is dropped."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.creditgraph_loaded = (-1, "")  # until the last tensor is loaded
        self.creditgraph_own = False
        self.creditgraph_coming = (version, Checksum())
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.model)

    def creditgraph_take(self, forms: Sequence[Form], shared: Mapping[str, Any] | None = None) -> None:
        """Loads a bucket of tensors of these forms, from shared memory if it is given, else from the group."""
        from vllm.config import set_current_vllm_config

        if self.creditgraph_coming is None:
            raise RuntimeError("creditgraph: expected a transfer that was begun, got a bucket without one.")
        if shared is not None:
            flat = open_shared(shared, self.device)
        elif self.creditgraph_group is not None:
            empty = torch.empty(size_of(forms), dtype=torch.uint8, device=self.device)
            flat = self.creditgraph_group.broadcast(empty)
        else:
            raise RuntimeError("creditgraph: expected a group to receive from, got a bucket before one was joined.")
        pairs: list[tuple[str, Tensor]] = cut(flat, forms)
        for name, tensor in pairs:
            self.creditgraph_coming[1].add(name, tensor)
        with torch.inference_mode(), set_current_vllm_config(self.vllm_config):
            self.model_runner.model.load_weights(pairs)

    def creditgraph_end(self) -> None:
        """Finishes the layers; the checksum of all tensors is then part of the worker's state."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.creditgraph_coming is None:
            raise RuntimeError("creditgraph: expected a transfer that was begun, got its end without one.")
        version, checksum = self.creditgraph_coming
        self.creditgraph_coming = None
        model = self.model_runner.model
        with torch.inference_mode(), set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
            refresh_tied(model)
        self.creditgraph_loaded = (version, checksum.result())

    def creditgraph_free_bytes(self) -> int:
        """Free memory of this worker's GPU."""
        return int(torch.cuda.mem_get_info(self.device)[0])


def refresh_tied(model: Any) -> None:
    """Packs a tied output head again: on CPUs it has a packed copy of the embedding, which a reload does not update."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
