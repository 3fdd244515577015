"""What the tests run on every rank of the pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from creditgraph.components.learner.logprobs import Head, VocabShard, token_logprobs
from creditgraph.components.learner.megatron.cpu import megatron_on_cpu
from creditgraph.components.learner.megatron.model import MegatronModel
from creditgraph.components.learner.megatron.parallel import init_parallel
from creditgraph.components.learner.megatron.settings import ParallelLayout
from creditgraph.components.learner.megatron.weights import fill, parts
from creditgraph.components.learner.packing.pack import PackedBatch, pack
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.core.jagged import Jagged


def built(
    path: str, sizes: dict[str, Any], recompute: str = "none", dtype: torch.dtype = torch.float32
) -> MegatronModel:
    layout = ParallelLayout(**sizes)
    init_parallel(layout)
    model = MegatronModel.build(path, layout, recompute=recompute, dtype=dtype)
    model.load(path)
    return model


def kept_bytes(path: str, sizes: dict[str, Any], most: int) -> int:
    """Bytes that a pass over rows with one prefix keeps for the backward pass, with copies up to `most` bytes."""
    from creditgraph.components.learner.packing import attention

    own = attention.KEPT_COPIES
    attention.KEPT_COPIES = most
    storages: dict[int, tuple[Any, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    model = built(path, sizes)
    prompts = Jagged.from_rows([[1 + n % 7 for n in range(40)]] * 8)
    batch = pack(prompts, Jagged.from_rows([[i, 3, 5] for i in range(8)]), torch.arange(8), share=True)
    try:
        with megatron_on_cpu(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.forward(model.chunks[0], batch)
    finally:
        attention.KEPT_COPIES = own
    return sum(size for _, size in storages.values())


def config_fields(path: str, sizes: dict[str, Any]) -> set[str]:
    """The fields of TransformerConfig that are passed when a model is built."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    passed: set[str] = set()
    own = TransformerConfig.__init__

    def init(self: Any, **fields: Any) -> None:
        passed.update(fields)
        own(self, **fields)

    TransformerConfig.__init__ = init
    try:
        built(path, sizes)
    finally:
        TransformerConfig.__init__ = own
    return passed


def objective(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """Any loss: differently weighted log-probs and entropies."""
    weights = torch.linspace(-1.0, 2.0, len(logprobs))
    return (weights * logprobs).sum() + 0.3 * (weights.flip(0) * entropies).sum()


def differing(model: MegatronModel, path: str, dtype: torch.dtype) -> list[str]:
    """Names whose export differs from the file; names missing or doubled."""
    from safetensors.torch import load_file

    expected = load_file(f"{path}/model.safetensors")
    bad = []
    for name, tensor in model.export():
        if name not in expected or not torch.equal(expected.pop(name).to(dtype), tensor):
            bad.append(name)
    return bad + sorted(expected)


def _fill(model: MegatronModel, tensors: Any) -> None:
    with megatron_on_cpu():
        fill(model.bridge, parts(model.bridge, model.chunks), tensors)


def most_held(path: str, sizes: dict[str, Any]) -> tuple[int, int]:
    """Most whole tensors alive at once while loading, and while exporting."""
    import weakref

    from safetensors.torch import load_file

    model, most = built(path, sizes), [0, 0]
    references: list[Any] = []

    def count(tensors: Any, way: int) -> Any:
        for name, tensor in tensors:
            references.append(weakref.ref(tensor))
            most[way] = max(most[way], sum(r() is not None for r in references))
            yield name, tensor

    file = load_file(f"{path}/model.safetensors")
    _fill(model, count(((name, tensor.clone()) for name, tensor in file.items()), 0))
    references.clear()
    for _ in count(model.export(), 1):
        pass
    return most[0], most[1]


def chain(path: str, steps: list[dict[str, Any]]) -> list[str]:
    """Weights handed from layout to layout by `export` and `fill`; what differs from the file in the end."""
    from safetensors.torch import load_file

    tensors = dict(built(path, steps[0]).export())
    for sizes in steps[1:]:
        layout = ParallelLayout(**sizes)
        init_parallel(layout)
        model = MegatronModel.build(path, layout)
        _fill(model, reversed(tensors.items()))
        tensors = dict(model.export())
    expected = load_file(f"{path}/model.safetensors")
    return [
        k
        for k in expected.keys() | tensors.keys()
        if k not in expected or k not in tensors or not torch.equal(expected[k], tensors[k])
    ]


def train(
    path: str,
    sizes: dict[str, Any],
    prompts: Jagged,
    responses: Jagged,
    cuts: list[Tensor],
    recompute: str = "none",
    dtype: torch.dtype = torch.float32,
) -> tuple[list[str], list[tuple[Tensor, Tensor, dict[str, Tensor]]] | None]:
    """What the export has wrong; then log-probs, entropies and gradients of separate rows, and with shared prefixes.

    The latter come from one rank of the last stage, None from the others. `cuts` are the rows of each micro-batch, on
    each of which the objective acts.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    with megatron_on_cpu():
        model = built(path, sizes, recompute, dtype)
        config = model.transformer_config
        config.calculate_per_token_loss = True
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        wrapped = [DistributedDataParallel(config, settings, chunk) for chunk in model.chunks]
        config.finalize_model_grads_func = finalize_model_grads
        batches = [[pack(prompts, responses, rows, share=share) for rows in cuts] for share in (False, True)]
        assert [sum(b.saved for b in some) > 0 for some in batches] == [False, True]
        out = [_pass(model, wrapped, some) for some in batches]
    one = (
        model.chunks[-1].post_process
        and not mpu.get_tensor_model_parallel_rank()
        and not mpu.get_data_parallel_rank(with_context_parallel=True)
    )
    return differing(model, path, dtype), out if one else None


def freed_while_sent(*args: Any) -> tuple[int, int]:
    """Tensors that `train` sends to another stage, and how many of them are freed before the send has completed."""
    from unittest.mock import patch

    from megatron.core.pipeline_parallel import p2p_communication

    sent: list[bool] = []

    class Sending:
        def __init__(self, work: Any, tensor: Tensor) -> None:
            self.work, self.tensor, self.size = work, tensor, tensor.numel()

        def wait(self) -> None:
            self.work.wait()
            sent.append(self.tensor.numel() != self.size)

    def watched(**tensors: Any) -> Any:
        requests = own(**tensors)
        for name in ("send_next", "send_prev"):
            if name in requests:
                requests[name] = Sending(requests[name], tensors[f"tensor_{name}"])
        return requests

    own = p2p_communication._p2p_ops
    with patch.object(p2p_communication, "_p2p_ops", watched):
        train(*args)
    return len(sent), sum(sent)


def _pass(
    model: MegatronModel, wrapped: list[Any], batches: list[PackedBatch]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    outputs: list[tuple[Tensor, Tensor]] = [(torch.zeros(0), torch.zeros(0))]

    def step(given: Any, chunk: Any) -> Any:
        batch: PackedBatch = next(given)

        def loss(hidden: Tensor) -> Any:
            logprobs, entropies = (x.values for x in model.logprobs(hidden, batch, temperature=0.8))
            outputs.append((logprobs.detach(), entropies.detach()))
            return objective(logprobs, entropies), torch.tensor(1), {}

        return model.forward(chunk, batch), loss

    for chunk in wrapped:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in wrapped] if len(wrapped) > 1 else iter(batches),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(batches),
        seq_length=max(len(b.input_ids[0]) for b in batches),
        micro_batch_size=1,
        forward_only=False,
    )
    # megatron-core summed over micro-batches and replicas, all alike, and divided by the "tokens": one per micro-batch
    # and rank.
    factor = len(batches) * mpu.get_context_parallel_world_size()
    weights = [(p, p.data) for chunk in model.chunks for p in chunk.parameters()]
    for parameter, _ in weights:
        parameter.data = parameter.main_grad * factor
    gradients = dict(model.export())
    for parameter, data in weights:
        parameter.data = data
    return torch.cat([f[0] for f in outputs]), torch.cat([f[1] for f in outputs]), gradients


def head(
    tensor: int, hidden: Tensor, weight: Tensor, targets: Tensor, cases: list[tuple[int, float, str]]
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Log-probs, entropies and gradients of hidden states and of this rank's rows of the weight, for each case.

    One case has the gradient of the hidden states summed outside, as sequence parallel does.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    init_parallel(ParallelLayout(tensor_parallel=tensor))
    group, rank = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_rank()
    size, out = len(weight) // tensor, []
    for i, (vocab, temperature, by) in enumerate(cases):
        h, w = hidden.clone().requires_grad_(), weight[rank * size : (rank + 1) * size].clone().requires_grad_()
        start = rank * size
        shard = VocabShard(start=start, size=min(max(vocab - start, 0), size), group=group, reduce_hidden=i != 2)
        logprobs, entropies = token_logprobs(h, targets, Head(weight=w, shard=shard), temperature, chunk=5 * i)
        c = torch.linspace(-1.0, 2.0, len(targets))
        by_logprobs, by_entropies = (c * logprobs).sum(), (c.flip(0) * entropies).sum()
        {"logprobs": by_logprobs, "entropies": by_entropies, "both": by_logprobs + by_entropies}[by].backward()
        if i == 2:
            dist.all_reduce(h.grad, group=group)
        out.append((logprobs.detach(), entropies.detach(), h.grad, w.grad))
    return out


def loading_error(path: str, sizes: dict[str, Any]) -> DataError | None:
    """What loading said on this rank."""
    try:
        built(path, sizes)
    except DataError as error:
        return error
    return None


def vocabulary(path: str, sizes: dict[str, Any]) -> tuple[int, int, int]:
    """True vocabulary, padded vocabulary and this rank's rows of the head."""
    model = built(path, sizes)
    return model.vocab_size, model.bridge.padded_vocab_size, len(model.head_weight())


def layout_error(sizes: dict[str, Any]) -> str:
    """What making the groups of a layout said on this rank."""
    try:
        init_parallel(ParallelLayout(**sizes))
    except ConfigError as error:
        return str(error)
    return ""
