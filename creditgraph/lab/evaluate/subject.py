"""Subjects of an evaluation, which are checkpoints of runs or models, and the engine that samples from them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from creditgraph.components.models.load import resolve_model_path
from creditgraph.lab.evaluate.request import Request
from creditgraph.lab.evaluate.sets import output_of
from creditgraph.pipeline.core.component import Context, ModelSpec, set_up
from creditgraph.pipeline.core.errors import ConfigError, RunError, did_you_mean
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.core.registry import build_component, load_class
from creditgraph.pipeline.core.settings import build_config
from creditgraph.pipeline.core.sockets import sockets_of
from creditgraph.pipeline.run.checkpoint import numbered, read_manifest
from creditgraph.pipeline.run.compose.choices import list_choices, read_yaml, resolved_section
from creditgraph.pipeline.run.compose.experiment import graph_dict, settings_of_run
from creditgraph.pipeline.run.compose.overrides import deep_merge
from creditgraph.pipeline.run.replay import published
from creditgraph.pipeline.run.run_directory import lock_holder
from creditgraph.pipeline.run.run_settings import resolve_device

_EDGE = 1 << 20  # bytes at each end of a weight file that its fingerprint reads


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The component that samples, and its settings."""

    use: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SubjectWeights:
    """Weights that can be evaluated.

    Attributes:
        name: an iteration of six digits, "initial", or a folder's name.
        fingerprint: hash of the weights.
        weights: reads the weights.
        notes: notes for the user.
    """

    name: str
    fingerprint: str
    weights: Callable[[], Weights] = field(repr=False)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that can be evaluated.

    Attributes:
        name: name in tables.
        folder: directory of the eval/ folder.
        checkpoint: the weights.
        spec: the model.
        engine: what samples.
        device, threads: device and number of CPU threads.
        train: the data section it was trained on, None without one.
    """

    name: str
    folder: Path
    checkpoint: SubjectWeights
    spec: ModelSpec
    engine: EngineChoice
    device: str
    threads: int = 1
    train: dict[str, Any] | None = None


def open_run_subject(path: Path, request: Request, dirs: Sequence[Path]) -> Subject:
    """The checkpoint of a run that the request names.

    Args:
        path: run directory.
        request: the command line.
        dirs: config folders.

    Raises:
        RunError: there is no such run or checkpoint, or the run is still training and no number was given.
    """
    values = settings_of_run(path)
    spec = _model({**(values.get("model") or {}), **request.changed("model")}, str(path / "config.yaml"))
    run = values.get("run") or {}
    return Subject(
        name=path.resolve().name,
        folder=path,
        checkpoint=_open_checkpoint(path, request.checkpoint, spec),
        spec=spec,
        engine=_engine_of_run(values, request, dirs),
        device=resolve_device(request.device or run.get("device", "auto")),
        threads=int(run.get("threads", 1)),
        train=(values.get("data") or {}).get("train"),
    )


def open_model_subject(name: str, request: Request, dirs: Sequence[Path]) -> Subject:
    """A model of configs/model, a folder, or a hub name, with its own weights."""
    known = list_choices("model", dirs)
    base = read_yaml(known[name]) if name in known else {"path": name}
    looks_like_path = name.startswith((".", "/", "~")) or "/" in name
    if name not in known and not looks_like_path and not Path(name).is_dir():
        raise ConfigError(
            f"model={name}: no model of that name; expected a file of configs/model, a folder or "
            f"owner/name.{did_you_mean(name, known)}"
        )
    spec = _model({**base, **request.changed("model")}, f"model={name}")
    short = Path(name).name
    return Subject(
        name=short,
        folder=Path(request.root) / f"model-{_file_name(short)}",
        checkpoint=_initial(spec),
        spec=spec,
        engine=_chosen_engine(EngineChoice(use="engine.local"), {}, request, dirs),
        device=resolve_device(request.device or "auto"),
    )


class Engines:
    """The engine that is running; it is kept for the next subject when model and settings are the same."""

    def __init__(self) -> None:
        self._running: tuple[tuple[Any, ...], Any] | None = None
        self._loads = 0

    def start(self, subject: Subject) -> Policy:
        """The engine with the subject's weights."""
        key = (subject.engine, subject.spec, subject.device)
        # As in training, so that results on a CPU are bitwise the same.
        if subject.threads and subject.device == "cpu":
            torch.set_num_threads(subject.threads)
        if self._running is None or self._running[0] != key:
            self.close()
            engine = build_component(subject.engine.use, subject.engine.settings, "engine")
            context = Context(node="engine", device=subject.device, model=subject.spec)
            self._running = key, set_up(engine, context)
        engine = self._running[1]
        cls: Any = type(engine)
        (socket,) = sockets_of(cls).inputs
        # Engines identify weights by version, and those of two runs may have the same.
        weights = dataclasses.replace(subject.checkpoint.weights(), version=self._loads)
        self._loads += 1
        policy: Policy = getattr(engine.run(**{socket: weights}), output_of(cls, Policy))
        return policy

    def close(self) -> None:
        """Frees memory and processes."""
        if self._running is not None:
            self._running[1].close()
            self._running = None


def _model(settings: Mapping[str, Any], place: str) -> ModelSpec:
    spec, problems = build_config(ModelSpec, dict(settings), "model")
    if problems:
        raise ConfigError(f"{place}: " + "\n".join(problems))
    assert isinstance(spec, ModelSpec)
    return spec


def _engine_of_run(values: dict[str, Any], request: Request, dirs: Sequence[Path]) -> EngineChoice:
    nodes = graph_dict(values)[0]["nodes"].values()
    engines = [
        EngineChoice(use=node["use"], settings=dict(node.get("config") or {}))
        for node in nodes
        if output_of(load_class(node["use"]), Policy)
    ]
    return _chosen_engine(engines[0] if engines else EngineChoice(use="engine.local"), values, request, dirs)


def _chosen_engine(
    own: EngineChoice, values: Mapping[str, Any], request: Request, dirs: Sequence[Path]
) -> EngineChoice:
    """The engine of the command line; references in its file (to the learner's LoRA) are resolved in `values`."""
    engine = own
    if request.engine:
        known = list_choices("engine", dirs)
        if request.engine not in known:
            raise ConfigError(f"engine={request.engine}: no engine of that name.{did_you_mean(request.engine, known)}")
        chosen = resolved_section("engine", known[request.engine], values)
        use = str(chosen.pop("use"))
        # Another engine has other settings, so those of the run's engine do not apply to it.
        engine = EngineChoice(use=use, settings=deep_merge(own.settings if use == own.use else {}, chosen))
    return dataclasses.replace(engine, settings=deep_merge(engine.settings, request.changed("engine")))


def _open_checkpoint(path: Path, name: str, spec: ModelSpec) -> SubjectWeights:
    if name == "initial":
        return _initial(spec)
    if not name.isdigit() and name != "latest":
        return _exported(Path(name).expanduser())
    folders = {int(folder.name): folder for folder in numbered(path / "checkpoints")}
    existing = f"; there are {', '.join(map(str, folders))}" if folders else "; there are none yet"
    holder = lock_holder(path / "lock")
    if holder and name == "latest":
        raise RunError(
            f"{path}: still training ({holder}), so its latest checkpoint changes; wait for it to end, or name a "
            f"checkpoint with checkpoint=N{existing}."
        )
    if not folders:
        raise RunError(
            f"{path / 'checkpoints'}: no checkpoint; continue the run with creditgraph train, or evaluate its "
            "untrained model with checkpoint=initial."
        )
    if name != "latest" and int(name) not in folders:
        raise RunError(f"checkpoint={name}: {path / 'checkpoints'} has none of that iteration{existing}.")
    notes = [f"{path}: still training ({holder}); evaluating its checkpoint {name}"] if holder else []
    for folder in reversed(folders.values()) if name == "latest" else [folders[int(name)]]:
        try:
            fingerprint = str(read_manifest(folder)["files"]["tensors.safetensors"]["sha256"])[:16]
        except RunError as error:
            if name != "latest":
                raise RunError(f"{error} Choose another{existing}.") from error
            notes.append(f"{folder} is damaged; the previous checkpoint is evaluated")
            continue
        return SubjectWeights(
            name=folder.name, fingerprint=fingerprint, weights=partial(_published, folder), notes=tuple(notes)
        )
    raise RunError(f"{path / 'checkpoints'}: no checkpoint can be read; continue the run, or use checkpoint=initial.")


def _published(folder: Path) -> Weights:
    """The weights after the iteration of a checkpoint."""
    weights = published(folder.parent.parent, int(folder.name))
    if weights is None:
        raise RunError(
            f"{folder}: holds no published weights; expected a graph with a learner. Write a model folder and evaluate "
            "it with checkpoint=FOLDER."
        )
    return weights


def _exported(folder: Path) -> SubjectWeights:
    if not folder.is_dir():
        raise RunError(
            f"checkpoint={folder}: no such folder; expected latest, initial, the number of an iteration, or a folder "
            "with safetensors (creditgraph export writes one)."
        )
    weights = Weights(version=1, path=str(folder))
    name = _file_name(folder.resolve().name)
    return SubjectWeights(name=name, fingerprint=_fingerprint(folder), weights=lambda: weights)


def _initial(spec: ModelSpec) -> SubjectWeights:
    path = resolve_model_path(spec.path)
    fingerprint = _fingerprint(Path(path)) if Path(path).is_dir() else f"hub:{path}"
    return SubjectWeights(name="initial", fingerprint=fingerprint, weights=lambda: Weights(version=0))


def _fingerprint(folder: Path) -> str:
    """Hash of name, size, first and last MiB of each weight file; reading all of a large model would take minutes."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RunError(f"{folder}: no weights (*.safetensors); expected a model folder in Hugging Face layout.")
    digest = sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(_EDGE))
            handle.seek(max(0, size - _EDGE))
            digest.update(handle.read(_EDGE))
    return digest.hexdigest()[:16]


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "_", text)
