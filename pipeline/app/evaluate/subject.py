"""What is evaluated: a checkpoint of a run, or a model as it is; and the engine that samples from it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from components.models.load import resolve_model_path
from pipeline.core.component import Context, ModelSpec
from pipeline.core.errors import ConfigError, RunError, did_you_mean
from pipeline.core.payloads import Policy, Weights
from pipeline.core.registry import load_class
from pipeline.core.settings import build_config
from pipeline.core.sockets import sockets_of
from pipeline.run.checkpoint import load
from pipeline.run.compose import deep_merge, graph_dict, list_choices, read_yaml, resolved_section
from pipeline.run.run_directory import lock_holder
from pipeline.run.run_settings import resolve_device

_EDGE = 1 << 20  # bytes at each end of a weight file that its fingerprint reads


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Which component samples, and its settings."""

    use: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the command line says about models and engines.

    Attributes:
        dirs: config folders.
        engine: a choice of the engine group, "" keeps the run's (or local).
        engine_settings, model_settings: merged over what the run has.
        device: "" keeps the run's (or auto).
        root: folder of run directories.
    """

    dirs: Sequence[Path]
    engine: str = ""
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    root: Path = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that can be evaluated.

    Attributes:
        name: for tables.
        folder: directory that gets the eval/ folder.
        checkpoint: name of what is evaluated: an iteration of six digits, "initial", or a folder's name.
        spec: the model.
        engine: what samples.
        device, threads: where.
        train: the data section it was trained on, None when there is none.
        fingerprint: of the weights, in few words.
        weights: reads them.
        notes: what a user should know.
    """

    name: str
    folder: Path
    checkpoint: str
    spec: ModelSpec
    engine: Engine
    device: str
    threads: int
    train: dict[str, Any] | None
    fingerprint: str
    weights: Callable[[], Weights] = field(repr=False)
    notes: tuple[str, ...] = ()


def open_run_subject(path: Path, checkpoint: str, choices: Choices) -> Subject:
    """A checkpoint of a run.

    Args:
        path: run directory.
        checkpoint: "latest", "initial", the number of an iteration, or a folder with safetensors in Hugging Face
            layout.
        choices: of the command line.

    Raises:
        RunError: there is no such run or checkpoint, or the run is still training and no number was given.
    """
    config = path / "config.yaml"
    if not config.is_file():
        near = [p.name for p in path.parent.iterdir() if (p / "config.yaml").exists()] if path.parent.is_dir() else []
        raise RunError(
            f"{path}: no run there (no config.yaml); wanted a run "
            f"directory.{did_you_mean(path.name, near) if near else ''}"
        )
    values = read_yaml(config)
    spec = _model({**(values.get("model") or {}), **choices.model_settings}, str(config))
    run = values.get("run") or {}
    label, fingerprint, weights, notes = _checkpoint(path, checkpoint, spec)
    return Subject(
        name=path.resolve().name,
        folder=path,
        checkpoint=label,
        spec=spec,
        engine=_engine_of_run(values, choices),
        device=resolve_device(choices.device or run.get("device", "auto")),
        threads=int(run.get("threads", 1)),
        train=(values.get("data") or {}).get("train"),
        fingerprint=fingerprint,
        weights=weights,
        notes=notes,
    )


def open_model_subject(name: str, choices: Choices) -> Subject:
    """A model of configs/model, a folder, or a hub name, with its own weights."""
    known = list_choices("model", choices.dirs)
    base = read_yaml(known[name]) if name in known else {"path": name}
    looks_like_path = name.startswith((".", "/", "~")) or "/" in name
    if name not in known and not looks_like_path and not Path(name).is_dir():
        raise ConfigError(
            f"model={name}: no model of that name; wanted a file of configs/model, a folder or "
            f"owner/name.{did_you_mean(name, known)}"
        )
    spec = _model({**base, **choices.model_settings}, f"model={name}")
    fingerprint, weights = _own_weights(spec)
    return Subject(
        name=Path(name).name,
        folder=choices.root / f"model-{_plain(Path(name).name)}",
        checkpoint="initial",
        spec=spec,
        engine=_chosen(choices, Engine(use="engine.local"), {}),
        device=resolve_device(choices.device or "auto"),
        threads=1,
        train=None,
        fingerprint=fingerprint,
        weights=weights,
    )


class Engines:
    """The engine that is running; it goes on to the next subject where model and settings are the same."""

    def __init__(self) -> None:
        self._running: tuple[tuple[Any, ...], Any] | None = None
        self._loads = 0

    def start(self, subject: Subject) -> Policy:
        """The engine with the subject's weights."""
        key = (subject.engine, subject.spec, subject.device)
        if subject.threads and subject.device == "cpu":
            torch.set_num_threads(subject.threads)
        if self._running is None or self._running[0] != key:
            self.close()
            self._start(key, subject)
        assert self._running is not None
        engine = self._running[1]
        cls: Any = type(engine)
        (socket,) = sockets_of(cls).inputs
        # Engines tell weights apart by version, and those of two runs may have the same.
        weights = dataclasses.replace(subject.weights(), version=self._loads)
        self._loads += 1
        policy: Policy = getattr(engine.run(**{socket: weights}), _policy_output(cls))
        return policy

    def close(self) -> None:
        """Gives memory and processes back."""
        if self._running is not None:
            self._running[1].close()
            self._running = None

    def _start(self, key: tuple[Any, ...], subject: Subject) -> None:
        cls: Any = load_class(subject.engine.use)
        config, problems = build_config(cls.Config, subject.engine.settings, "engine")
        if problems:
            raise ConfigError("\n".join(problems))
        engine = cls(config)
        self._running = key, engine
        engine.setup(Context(node="engine", device=subject.device, model=subject.spec))


def _model(settings: Mapping[str, Any], place: str) -> ModelSpec:
    spec, problems = build_config(ModelSpec, dict(settings), "model")
    if problems:
        raise ConfigError(f"{place}: " + "\n".join(problems))
    assert isinstance(spec, ModelSpec)
    return spec


def _engine_of_run(values: dict[str, Any], choices: Choices) -> Engine:
    nodes = graph_dict(values)[0]["nodes"]
    found = [
        Engine(use=s["use"], settings=dict(s.get("config") or {}))
        for s in nodes.values()
        if _policy_output(load_class(s["use"]))
    ]
    return _chosen(choices, found[0] if found else Engine(use="engine.local"), values)


def _chosen(choices: Choices, own: Engine, values: Mapping[str, Any]) -> Engine:
    """The engine of the command line; what its file refers to (the learner's LoRA) is read from `values`, the run's configuration."""
    engine = own
    if choices.engine:
        known = list_choices("engine", choices.dirs)
        if choices.engine not in known:
            raise ConfigError(f"engine={choices.engine}: no engine of that name.{did_you_mean(choices.engine, known)}")
        chosen = resolved_section("engine", known[choices.engine], values)
        use = str(chosen.pop("use"))
        # Another engine has other settings: those of the run's are left behind.
        engine = Engine(use=use, settings=deep_merge(own.settings if use == own.use else {}, chosen))
    return dataclasses.replace(engine, settings=deep_merge(engine.settings, dict(choices.engine_settings)))


def _policy_output(cls: type) -> str:
    """The output of a component that is a policy, "" when it has none."""
    for name, socket in sockets_of(cls).outputs.items():
        if socket.carries(Policy):
            return name
    return ""


def _checkpoint(path: Path, wanted: str, spec: ModelSpec) -> tuple[str, str, Callable[[], Weights], tuple[str, ...]]:
    if wanted == "initial":
        fingerprint, weights = _own_weights(spec)
        return "initial", fingerprint, weights, ()
    if not wanted.isdigit() and wanted != "latest":
        folder = Path(wanted).expanduser()
        if not folder.is_dir():
            raise RunError(
                f"checkpoint={wanted}: no such folder; wanted latest, initial, the number of an iteration, or a folder "
                "with safetensors "
                "(tools/export_hf writes one)."
            )
        return (
            _plain(folder.resolve().name),
            _files_fingerprint(folder),
            lambda: Weights(version=1, path=str(folder)),
            (),
        )
    holder = lock_holder(path / "lock")
    if holder and wanted == "latest":
        raise RunError(
            f"{path}: still training ({holder}), so its latest checkpoint changes; wait for it to end, or name a "
            "checkpoint that is "
            f"there with checkpoint=N{_there(path)}."
        )
    notes = (f"{path}: still training ({holder}); evaluating its checkpoint {wanted}",) if holder else ()
    numbers = _numbers(path)
    if not numbers:
        raise RunError(
            f"{path / 'checkpoints'}: no checkpoint; train the run on (creditgraph train), or evaluate its untrained "
            "model with "
            "checkpoint=initial."
        )
    if wanted != "latest" and int(wanted) not in numbers:
        raise RunError(f"checkpoint={wanted}: {path / 'checkpoints'} has none of that iteration{_there(path)}.")
    for number in reversed(numbers) if wanted == "latest" else [int(wanted)]:
        folder = path / "checkpoints" / f"{number:06d}"
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            fingerprint = str(manifest["files"]["tensors.safetensors"]["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if wanted != "latest":
                raise RunError(
                    f"{folder}: not a readable checkpoint ({error}); choose another{_there(path)}."
                ) from error
            notes = (*notes, f"{folder} is damaged; the one before it is evaluated")
            continue
        return f"{number:06d}", fingerprint[:16], partial(_published, folder), notes
    raise RunError(f"{path / 'checkpoints'}: no checkpoint can be read; train the run on, or use checkpoint=initial.")


def _published(folder: Path) -> Weights:
    """The weights of the highest version that a checkpoint keeps for `@k` wires."""
    held = [
        v
        for v in load(folder, lambda group: group == "values").groups.get("values", {}).values()
        if isinstance(v, Weights)
    ]
    if not held:
        raise RunError(
            f"{folder}: holds no published weights; wanted a graph whose engine reads learner.weights@1. Write a model "
            "folder with "
            "tools/export_hf and evaluate it with checkpoint=FOLDER."
        )
    return max(held, key=lambda w: w.version)


def _own_weights(spec: ModelSpec) -> tuple[str, Callable[[], Weights]]:
    path = resolve_model_path(spec.path)
    fingerprint = _files_fingerprint(Path(path)) if Path(path).is_dir() else f"hub:{path}"
    return fingerprint, lambda: Weights(version=0)


def _files_fingerprint(folder: Path) -> str:
    """Of the weight files: name, size, first and last MiB of each; reading all of a large model takes minutes."""
    digest = sha256()
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise RunError(f"{folder}: no weights (*.safetensors); wanted a model folder in Hugging Face layout.")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(_EDGE))
            handle.seek(max(0, size - _EDGE))
            digest.update(handle.read(_EDGE))
    return digest.hexdigest()[:16]


def _numbers(path: Path) -> list[int]:
    folder = path / "checkpoints"
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and p.is_dir()) if folder.is_dir() else []


def _there(path: Path) -> str:
    numbers = _numbers(path)
    return (
        f"; there {'is' if len(numbers) == 1 else 'are'} {', '.join(map(str, numbers))}"
        if numbers
        else "; there is none yet"
    )


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "_", name)
