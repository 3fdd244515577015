"""One rank of the tests with TransformerEngine's sources: te_rank.py RANK SIZE PORT FOLDER.

FOLDER/jobs is a pickled list of ("file.function", arguments), of the files beside this one; FOLDER/answersRANK gets the
pickled results. A process of its own, because megatron-core looks for TransformerEngine once, at its import.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIBRARIES = ("megatron.", "transformer_engine.")
sys.path.append(str(HERE.parents[2]))  # modules that all tests share, as pytest has it


def _beside(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def classes(path: str, sizes: dict[str, Any]) -> dict[str, str]:
    """Class of each module of the first layer and of the final norm, without those of megatron-core's own."""
    chunk = sys.modules["ranks"].built(path, sizes).chunks[0]
    whole = {name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in chunk.named_modules()}
    kept = ("decoder.layers.0.", "decoder.final_layernorm")
    return {name.removeprefix(kept[0]): kind for name, kind in whole.items() if name.startswith(kept)}


def quantized(path: str, sizes: dict[str, Any], prompts: Any, responses: Any) -> dict[str, Any]:
    """By recipe: recipes, formats and multiples of tokens that the matrices saw, and the log-probs."""
    import torch

    from creditgraph.components.learner.megatron.cpu import megatron_on_cpu
    from creditgraph.components.learner.megatron.model import MegatronModel
    from creditgraph.components.learner.megatron.parallel import init_parallel
    from creditgraph.components.learner.megatron.settings import Fp8, LayerSettings, ParallelLayout
    from creditgraph.components.learner.packing.pack import pack

    layout, te = ParallelLayout(**sizes), sys.modules["te_torch"]
    init_parallel(layout)
    out = {}
    for recipe, kind in (("off", "hybrid"), ("delayed", "hybrid"), ("tensorwise", "e4m3"), ("blockwise", "e4m3"),
                         ("mxfp8", "e4m3")):  # fmt: skip
        layers = LayerSettings(fp8=Fp8(recipe=recipe, format=kind))
        with megatron_on_cpu():
            model = MegatronModel.build(path, layout, torch.bfloat16, layers=layers)
            model.load(path)
            te.CALLS.clear()
            batch = pack(prompts, responses, torch.arange(4))
            hidden = model.forward(model.chunks[0], batch)
            logprobs, _ = model.logprobs(hidden, batch)
            logprobs.values.sum().backward()
        products = [(given["inp"].shape[0], r) for name, given, r in te.CALLS if "Linear" in name]
        seen = {(type(r).__name__, r.fp8_format.name) if r else ("none", "") for _, r in products}
        out[recipe] = (sorted(seen), sorted({tokens for tokens, _ in products}), logprobs.values.detach())
    return out


def resume_unstepped(path: str, optimizer: dict[str, Any], target: str) -> int:
    """A checkpoint before any step, and the version after a step on it."""
    training = sys.modules["training"]
    first, second = (training.megatron_learner(path, optimizer, training.CASES["ppo_clip"]) for _ in range(2))
    first.save_shards(Path(target)).finish()
    second.load_shards(Path(target))
    return int(training.step(second, 0)["version"])


def adam_steps() -> int:
    """Calls of FusedAdam's kernel so far."""
    return int(sys.modules["te_torch"].ADAM_STEPS[0])


def refused(path: str) -> str:
    """What is said of mxfp8 on a Hopper GPU."""
    import torch

    from creditgraph.components.learner.megatron.model import MegatronModel
    from creditgraph.components.learner.megatron.parallel import init_parallel
    from creditgraph.components.learner.megatron.settings import Fp8, LayerSettings, ParallelLayout

    te, quantization = sys.modules["te_torch"], sys.modules["transformer_engine.pytorch.quantization"]
    te.CAPABILITY[:], quantization._MXFP8_SUPPORT = (9, 0), None
    init_parallel(ParallelLayout())
    try:
        MegatronModel.build(path, ParallelLayout(), torch.bfloat16, layers=LayerSettings(fp8=Fp8(recipe="mxfp8")))
    except ValueError as error:
        return str(error)
    return ""


def kernels(path: str, sizes: dict[str, Any], prompts: Any, responses: Any) -> dict[str, Any]:
    """Log-probs by each attention kernel on plain and on shared rows, and the masks that TransformerEngine's had."""
    import os

    import torch

    from creditgraph.components.learner.megatron.cpu import megatron_on_cpu
    from creditgraph.components.learner.megatron.layers.attention import TransformerEngineAttention
    from creditgraph.components.learner.packing.pack import pack

    ranks, te = sys.modules["ranks"], sys.modules["te_torch"]
    model, out = ranks.built(path, sizes), {}
    environment = {name: value for name, value in os.environ.items() if name.startswith("NVTE_")}
    for kernel in ("torch", "flash", "cudnn"):
        chosen = None if kernel == "torch" else TransformerEngineAttention(kernel)
        model.transformer_config.attention_kernel = chosen
        for share in (False, True):
            te.CALLS.clear()
            with megatron_on_cpu():
                batch = pack(prompts, responses, torch.arange(4), share=share)
                logprobs, _ = model.logprobs(model.forward(model.chunks[0], batch), batch)
                model.chunks[0].zero_grad()
                logprobs.values.sum().backward()
            gradient = model.chunks[0].decoder.layers[0].self_attention.linear_qkv.weight.grad
            calls = [given for name, given, _ in te.CALLS if name == "DotProductAttention"]
            masks = [(given["attn_mask_type"], given["window_size"]) for given in calls]
            out[kernel, share] = (logprobs.values.detach(), gradient, masks)
    assert environment == {name: value for name, value in os.environ.items() if name.startswith("NVTE_")}
    return out


def choices() -> dict[str, Any]:
    """Which kernel is chosen, by setting, and what is said where it is not there."""
    import importlib.util

    import torch

    from creditgraph.components.learner.megatron.layers import attention
    from creditgraph.components.learner.megatron.schedule import sum_over_ranks

    te, cpu = sys.modules["te_torch"], torch.device("cpu")

    def choose(setting: str) -> str:
        try:
            kernel = attention.choose_kernel(setting, (4, 2, 8), [None, 3], 32, torch.float32, cpu, sum_over_ranks)
        except ValueError as error:
            return str(error)
        return "torch" if kernel is None else kernel.kernel

    te.MISSING.add("flash")
    out = {setting: choose(setting) for setting in ("auto", "torch", "flash", "cudnn")}
    te.MISSING.clear()
    # The candidates of a GPU, whose times are given.
    measured = attention.measure
    times = {"torch": 3.0, "flash": 2.0, "cudnn": 2.5}
    attention.measure = lambda candidates, device, over_ranks: ({name: times[name] for name in candidates}, {})
    gpu = type("Device", (), {"type": "cuda"})()
    rows, attention._Rows = attention._Rows, lambda *args: type("Rows", (), {"attend": print})()
    find, importlib.util.find_spec = importlib.util.find_spec, lambda name: object()
    out["fastest"] = attention.choose_kernel("auto", (4, 2, 8), [None], 32, torch.float32, gpu, sum_over_ranks).kernel
    attention.measure, attention._Rows, importlib.util.find_spec = measured, rows, find
    return out


def main(rank: int, size: int, port: str, folder: Path) -> None:
    sources = _beside("te_sources")
    te = sources.load(sources.FOLDER)
    _beside("te_torch").install(te)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    from creditgraph.components.learner.megatron import cpu, model
    from creditgraph.components.learner.megatron.layers.parts import transformer_engine_parts

    model.chosen_parts = lambda settings, device: transformer_engine_parts()
    # The redirected calls are TransformerEngine's too, whose optimizer makes a tensor on the GPU.
    cpu._from_megatron = lambda depth: sys._getframe(depth).f_globals.get("__name__", "").startswith(LIBRARIES)
    places = {"ranks": _beside("ranks"), "training": _beside("training"), "te_rank": sys.modules[__name__]}
    out = []
    for name, args in pickle.loads((folder / "jobs").read_bytes()):
        place, _, function = name.partition(".")
        out.append(getattr(places[place], function)(*args))
    (folder / f"answers{rank}").write_bytes(pickle.dumps(out))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
