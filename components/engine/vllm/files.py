"""What runs inside the workers of a vLLM server: new weights from safetensors files, and what they hold."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from components.engine.served.channel import read_file, sample_checksum, wait_for
from components.engine.vllm.worker import ExactSampler, WorkerExtension


class FileExtension(WorkerExtension):
    """Methods that /collective_rpc calls; arguments and results are JSON."""

    def creditgraph_load_files(self, update: str) -> dict[str, Any]:
        """Loads the files of an update, each as soon as it is there; the state after it.

        Args:
            update: JSON with version, files, sample, and wait_seconds, within which the last file must be there.
        """
        wanted = json.loads(update)
        deadline = time.monotonic() + wanted["wait_seconds"]
        self.creditgraph_loaded = (-1, "")  # until the last file is loaded
        sample, names = {}, set(wanted["sample"])

        def passing() -> Iterator[tuple[str, Tensor]]:
            for file in wanted["files"]:
                wait_for(file, deadline)
                for name, tensor in read_file(file):
                    if name in names:
                        sample[name] = tensor
                    yield name, tensor

        self.creditgraph_reload(passing())
        # What the engine keeps under the same name and form is the better witness; fused and packed tensors are not
        # kept.
        held = {name: p.data for name, p in self.model_runner.model.named_parameters() if name in sample}
        sample |= {
            name: t for name, t in held.items() if t.shape == sample[name].shape and t.dtype == sample[name].dtype
        }
        self.creditgraph_loaded = (int(wanted["version"]), sample_checksum(sample, tuple(wanted["sample"])))
        return self.creditgraph_state()

    def creditgraph_state(self) -> dict[str, Any]:
        """Version and checksum of the weights held (−1 and "" before the first), and whether `creditgraph_install` was called."""
        version, checksum = self.creditgraph_loaded
        return {
            "version": version,
            "checksum": checksum,
            "installed": isinstance(self.model_runner.sampler, ExactSampler),
        }
