"""The backend of `learner.megatron`: this rank's part of a model, and megatron-core's optimiser of it."""

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.learner.backend import Backend, LossOf
from creditgraph.components.learner.head import plan_head
from creditgraph.components.learner.megatron.checkpoint import ShardWriter, load_shards, save_shards
from creditgraph.components.learner.megatron.cpu import megatron_on_cpu
from creditgraph.components.learner.megatron.layers.attention import choose_kernel
from creditgraph.components.learner.megatron.model import MegatronModel
from creditgraph.components.learner.megatron.optimizer import MegatronOptimizer, data_parallel, finalize_gradients
from creditgraph.components.learner.megatron.parallel import init_parallel
from creditgraph.components.learner.megatron.schedule import (
    ComputeClock,
    from_last_stage,
    is_last_stage,
    mean_and_maximum,
    objects_from_last_stage,
    run_schedule,
    sum_over_ranks,
)
from creditgraph.components.learner.megatron.settings import MegatronSettings
from creditgraph.components.learner.objective import Meters
from creditgraph.components.learner.optimizer import Update
from creditgraph.components.learner.packing.flash import check_fast, obstacle
from creditgraph.components.learner.packing.pack import PackedBatch
from creditgraph.components.models.load import check_context, load_config, resolve_model_path
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.jagged import Jagged


class MegatronBackend(Backend):
    """This rank's part of a model, and its optimiser. The last pipeline stage has the losses and log-probs.

    Args:
        context: context of the learner's node.
        config: settings of the learner.
    """

    def __init__(self, context: Context, config: MegatronSettings) -> None:
        super().__init__(context)
        self.max_context = check_context(context.model, load_config(context.model))
        with megatron_on_cpu():
            init_parallel(config, context.seed)
            self.model = self._load(config)
            # Without its adapters a model is the initial one.
            self.reference = self._load(config) if config.keeps_reference and not config.lora.rank else None
            self._choose_kernels(config)
            settings = self.model.transformer_config
            settings.finalize_model_grads_func = finalize_gradients
            self._clock = settings.timers = ComputeClock(context.device)
            settings.calculate_per_token_loss = True  # the loss arrives with its denominators
            several = context.device.startswith("cuda") and context.ranks.num_replicas > 1
            distributed = config.distributed_optimizer == "on" or (config.distributed_optimizer == "auto" and several)
            self.chunks = data_parallel(
                settings, self.model.chunks, distributed, _overlaps(config, several, distributed)
            )
            steps = context.iterations * config.steps_per_batch
            dtype = getattr(torch, context.model.dtype)
            self.optimizer = MegatronOptimizer(self.chunks, config.optimizer, steps, dtype, distributed)
        self._pipelined = config.pipeline_parallel > 1
        self._computed = 0.0
        self._passed = 0.0

    def _choose_kernels(self, config: MegatronSettings) -> None:
        """Attention and head of the models; ConfigError for slow attention on a GPU unless `slow_attention`."""
        shape = self.model.transformer_config
        device, dtype = torch.device(self.context.device), shape.params_dtype
        if device.type == "cuda":
            reasons = (obstacle(device, dtype, shape.kv_channels, window) for window in shape.attention_windows)
            check_fast(next(filter(None, reasons), ""), config.compute.slow_attention)
        tensor = config.tensor_parallel
        heads = (shape.num_attention_heads // tensor, max(shape.num_query_groups // tensor, 1), shape.kv_channels)
        tokens = config.micro_batch_tokens // config.context_parallel
        setting, windows = config.layers.attention, shape.attention_windows
        kernel = choose_kernel(setting, heads, windows, tokens, dtype, device, sum_over_ranks)
        rows = self.model.bridge.padded_vocab_size // tensor
        plan = plan_head(config.compute, (rows, shape.hidden_size), dtype, device, sum_over_ranks)
        for model in filter(None, (self.model, self.reference)):
            model.transformer_config.attention_kernel = kernel
            model.head_plan = plan

    def _load(self, config: MegatronSettings) -> MegatronModel:
        spec = self.context.model
        path = resolve_model_path(spec.path)
        dtype = getattr(torch, spec.dtype)
        device = self.context.device
        model = MegatronModel.build(
            path,
            config,
            dtype,
            config.recompute,
            device,
            layers=config.layers,
            transformer=config.transformer,
            lora=config.lora,
        )
        model.load(path)
        if config.lora.rank:
            model.adapt(config.lora, self.context.seed)
        return model

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in Hugging Face names, one at a time; all ranks of a replica iterate."""
        with megatron_on_cpu():
            self.optimizer.gather_weights()
        tensors = self.model.export()
        while True:
            # Not while the caller runs: its own CUDA calls are none of megatron's.
            with megatron_on_cpu():
                item = next(tensors, None)
            if item is None:
                return
            yield item

    def offloadable(self) -> tuple[list[Tensor], list[Tensor]]:
        """Main weights, moments and gradient buffers."""
        return self.optimizer.offloadable()

    @torch.no_grad()
    def export_adapters(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each adapted layer, by its Hugging Face name; all ranks of a replica call it."""
        assert self.model.adapters is not None
        with megatron_on_cpu():
            self.optimizer.gather_weights()
            return self.model.adapters.whole()

    def save(self, folder: Path, state: dict[str, Any]) -> ShardWriter:
        """Begins to write this rank's shards; see checkpoint.py."""
        with megatron_on_cpu():
            self.optimizer.gather_weights()
            return save_shards(folder, self.model.chunks, self.optimizer, state)

    def load(self, folder: Path) -> dict[str, Any]:
        """Loads a checkpoint of `save`, at this or another layout; returns its state."""
        with megatron_on_cpu():
            return load_shards(folder, self.model.chunks, self.optimizer)

    def score(self, batches: Iterable[PackedBatch], temperature: float, reference: bool) -> list[Jagged]:
        """Returns the log-probs of all micro-batches on the last stage; an empty list on the others."""
        model = (self.reference if reference else None) or self.model
        adapters = model.adapters.off() if reference and model.adapters else nullcontext()

        def consume(number: int, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Jagged]:
            logprobs, _ = model.logprobs(hidden, batch, temperature)
            return hidden.new_zeros(()), logprobs

        with megatron_on_cpu(), adapters:
            return run_schedule(model.chunks, model.forward, list(batches), consume, self.context.device, train=False)

    def forward_backward(self, batches: Iterable[PackedBatch], temperature: float, loss: LossOf) -> Tensor:
        """Accumulates gradients, and sums them over replicas at the end."""

        def consume(number: int, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            share = loss(number, *self.model.logprobs(hidden, batch, temperature))
            return share, share.detach().double()

        with megatron_on_cpu():
            packed = list(batches)
            self.optimizer.clear()
            self._clock.take()  # forget the passes of `score`
            start = time.perf_counter()
            losses = run_schedule(self.chunks, self.model.forward, packed, consume, self.context.device, train=True)
            self._computed += self._clock.take()
            self._passed += time.perf_counter() - start
        return torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=self.context.device)

    def update(self) -> Update:
        """Updates unless the gradient norm over all ranks is not finite."""
        with megatron_on_cpu():
            return self.optimizer.step()

    def skip_update(self) -> Update:
        """Advances the schedule; gradients are cleared before the next passes."""
        return self.optimizer.skip()

    def sum(self, value: Tensor) -> Tensor:
        """Sums over replicas on the last stage, which has the value, and sends the sum to the others."""
        return from_last_stage(self.context.all_sum(value) if is_last_stage() else value)

    def whole(self, value: Tensor) -> Tensor:
        """The last stage's value on all stages."""
        return from_last_stage(value)

    def values(self, meters: Meters) -> dict[str, float]:
        """The metrics of the last stage, the only one that has any, on all stages."""
        values: dict[str, float] = objects_from_last_stage(super().values(meters) if is_last_stage() else {})
        return values

    def pass_metrics(self) -> dict[str, float]:
        """The share of the passes' time in which the ranks did not compute: their mean, and the most idle one's."""
        if not self._pipelined:
            return {}
        mean, largest = mean_and_maximum(1 - self._computed / self._passed if self._passed else 0.0)
        self._computed = 0.0
        self._passed = 0.0
        return {"bubble": mean, "bubble_max": largest}


def _overlaps(config: MegatronSettings, several: bool, distributed: bool) -> dict[str, Any]:
    """Fields of DistributedDataParallelConfig: the defaults on this device, under those that are set."""
    gathers = config.ddp.get("overlap_param_gather", several and distributed and config.steps_per_batch > 1)
    return {"overlap_grad_reduce": several or gathers, "overlap_param_gather": gathers, **config.ddp}
