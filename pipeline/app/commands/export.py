"""`creditgraph export`: the weights of a run as a Hugging Face model folder, or in a repository of the hub.

The folder holds safetensors (with an index when there are several), config.json, generation_config.json, the tokenizer,
and a model card that names the recipe, the version, the data and the results.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from creditgraph.pipeline.app.arguments import add_output, add_trust
from creditgraph.pipeline.core.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from creditgraph.pipeline.core.component import ModelSpec
    from creditgraph.pipeline.core.payloads import Weights

SUMMARY = "Write the weights of a run as a Hugging Face model folder."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = (
        "examples:\n"
        "  creditgraph export runs/toy_srpo-s0 --output exported\n"
        "  creditgraph export runs/toy_srpo-s0 --output exported --iteration 40 --shard-gb 5\n"
        "  creditgraph export runs/toy_srpo-s0 --output exported --push me/toy-srpo"
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory, of learner.hf or learner.megatron")
    add_output(parser, "DIR", "folder to make; must not exist", type=Path, required=True)
    parser.add_argument("--iteration", type=int, help="of the checkpoint, from 0; default: the newest")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload it too, to a private repository of the hub")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="largest file (default: 5)")


def main(options: argparse.Namespace) -> int:
    """Writes the folder, whole or not at all."""
    import yaml

    from creditgraph.pipeline.core.component import ModelSpec
    from creditgraph.pipeline.run.trust import check_trusted

    output: Path = options.output
    if output.exists():
        raise RunError(f"{output} exists; expected a new folder. Remove it or choose another --output.")
    config = options.run / "config.yaml"
    if not config.is_file():
        raise RunError(f"{config} is missing; expected the directory of a run.")
    section = yaml.safe_load(config.read_text()).get("model") or {}
    check_trusted(options.run, {"model": section})
    model = ModelSpec(**section)
    weights = newest_weights(options.run, options.iteration)
    aside = output.with_name(f".tmp-{output.name}")
    shutil.rmtree(aside, ignore_errors=True)
    write(weights.tensors or {}, model, aside, options.shard_gb * 1e9)
    (aside / "README.md").write_text(model_card(options.run, weights.version, model.path), encoding="utf-8")
    aside.rename(output)
    print(f"{output}: weights of version {weights.version}, {len(weights.tensors or {})} tensors")
    if options.push:
        print(f"pushed to {push(output, options.push)}")
    return 0


def push(folder: Path, repository: str) -> str:
    """Uploads a model folder to a repository of the hub, which is made private if it is new; returns its address.

    Raises:
        RunError: there is no such owner, no token, or no connection; the folder stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    hub = HfApi(library_name="creditgraph")
    try:
        address = str(hub.create_repo(repository, private=True, exist_ok=True))
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Weights of a creditgraph run")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise RunError(
            f"--push {repository}: {reason}; {folder} is written. Log in with `hf auth login` and use "
            f"`hf upload {repository} {folder}`, or remove the folder and export again."
        ) from error
    return address


def model_card(run: Path, version: int, base: str) -> str:
    """A model card: how the weights were made, from files of the run directory alone."""
    import yaml

    from creditgraph.pipeline.app.overview import rows_of, text_of
    from creditgraph.pipeline.app.text import visible
    from creditgraph.pipeline.app.version import version_text

    (row,) = rows_of([run])
    head: dict[str, object] = {"library_name": "transformers", "tags": ["creditgraph", "reinforcement-learning"]}
    if "/" in base and not Path(base).exists():
        head["base_model"] = base
    data = row.config.get("data")
    section = row.config.get("run")
    seed = section.get("seed") if isinstance(section, dict) else None
    before, after = row.results.accuracy_before, row.results.accuracy_after
    facts = {
        "recipe": row.recipe,
        "base model": base,
        "optimiser updates in these weights": version,
        "iterations": f"{row.done} of {row.planned}",
        "seed": seed,
        "sampled tokens": row.results.sampled_tokens,
        **{f"data, {name}": text_of(entry) for name, entry in (data.items() if isinstance(data, dict) else ())},
        "held-out accuracy": None if before is None or after is None else f"{before:.3f} before, {after:.3f} after",
        "exported by": f"creditgraph {version_text()}",
    }
    evaluation = run / "eval.json"
    if evaluation.exists():
        facts["evaluation"] = text_of(json.loads(evaluation.read_text(encoding="utf-8")).get("metrics"))
    lines = [
        f"| {name} | {visible(value).replace('|', chr(92) + '|')} |"
        for name, value in facts.items()
        if value is not None
    ]
    front = yaml.safe_dump(head, sort_keys=False)
    return f"---\n{front}---\n\n# {visible(run.resolve().name)}\n\n" + "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _no(_: str) -> bool:
    return False


def newest_weights(run: Path, iteration: int | None) -> Weights:
    """The weights after the iteration of a checkpoint, by default the newest valid one."""
    from creditgraph.pipeline.run.checkpoint import Checkpoints, load
    from creditgraph.pipeline.run.replay import published

    folder = run / "checkpoints"
    if not folder.is_dir():
        raise RunError(f"{folder} is missing; expected the directory of a run that has saved.")
    # Of the checkpoint only its iteration: a sampler's state may hold payloads of a class that is not imported here.
    found = Checkpoints(folder).latest(reads=_no) if iteration is None else load(folder / f"{iteration:06d}", _no)
    if found is None:
        raise RunError(
            f"{run} has no valid checkpoint; expected one. Set run.checkpoint.every, or end the run with Ctrl-C once."
        )
    weights = published(run, found.iteration)
    if weights is None or weights.tensors is None:
        raise RunError(
            f"the checkpoint after iteration {found.iteration} has no published weights; expected a graph with "
            "a learner."
        )
    return weights


def write(tensors: dict[str, Tensor], model: ModelSpec, folder: Path, limit: float) -> None:
    """Writes a model folder.

    Args:
        tensors: name → weights.
        model: whose configuration and tokenizer are added.
        folder: to make.
        limit: largest size of a file [bytes].
    """
    from safetensors.torch import save_file

    from creditgraph.components.models.load import load_config, load_tokenizer, resolve_model_path

    folder.mkdir(parents=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0.0
    for name, tensor in tensors.items():
        needed = tensor.numel() * tensor.element_size()
        if shards[-1] and size + needed > limit:
            shards.append({})
            size = 0.0
        shards[-1][name] = tensor.contiguous()
        size += needed
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {key: name for name, s in zip(names, shards, strict=True) for key in s},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    load_config(model).save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)
    own = Path(resolve_model_path(model.path)) / "generation_config.json"
    if own.is_file():
        shutil.copy(own, folder)
