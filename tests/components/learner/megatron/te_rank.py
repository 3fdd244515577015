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
