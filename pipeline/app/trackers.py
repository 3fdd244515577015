"""Sinks that show a run elsewhere: Weights & Biases and TensorBoard. Both are imported only when a run uses them."""

from __future__ import annotations

import io
import logging
import re
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.drawing import draw
from creditgraph.pipeline.app.rollout_table import COLUMNS, RolloutTables
from creditgraph.pipeline.core.errors import RunError, extra, find_package
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.run.checkpoint import numbered
from creditgraph.pipeline.run.metrics import Sink, WandbSettings
from creditgraph.pipeline.run.run_directory import write_aside, writing

logger = logging.getLogger("creditgraph")

WANDB_URL = "wandb_url"  # in the run directory: the address of the run, for its report


class Wandb:
    """Mirrors metrics, rollouts, the graph and, if set, checkpoints to wandb; a continued run keeps its wandb id.

    Args:
        settings: the section run.wandb.
        run_path: run directory.
        config: resolved configuration.
        graph: drawn once, when the run is new to wandb.
        tables: rollouts to show.
        iterations: number of iterations of the run; the final pass logs under this number.

    Raises:
        ConfigError: the package wandb is not installed.
        RunError: wandb does not start.
    """

    def __init__(
        self,
        settings: WandbSettings,
        run_path: Path,
        config: dict[str, Any],
        *,
        graph: Graph | None = None,
        tables: RolloutTables | None = None,
        iterations: int = 1 << 24,
    ) -> None:
        with _wandb_extra(settings.mode):
            import wandb

        self._wandb: Any = wandb
        self._path = run_path
        self._settings = settings
        self._iterations = iterations
        self._step = 0
        self._tables = tables
        id_path = run_path / "wandb_id"
        # Kept in the run directory, so that offline parts of a continued run are sent as one.
        new = not id_path.exists()
        if new:
            write_aside(id_path, uuid.uuid4().hex[:8])
        try:
            self._run = wandb.init(
                mode=settings.mode,
                project=settings.project,
                entity=settings.entity or None,
                name=run_path.name,
                id=id_path.read_text(encoding="utf-8").strip(),
                dir=str(run_path),
                config=config,
                resume="allow" if settings.mode == "online" else None,
                settings=wandb.Settings(console="off"),  # the run has its own logs, and ranks write to one terminal
            )
        except wandb.errors.Error as error:
            raise RunError(
                f"run.wandb.mode={settings.mode}: wandb did not start ({str(error).splitlines()[0]}); expected "
                "a project it may write to. Log in with `wandb login`, or set run.wandb.mode=offline."
            ) from error
        if self._run.url:
            write_aside(run_path / WANDB_URL, self._run.url)
        self._run.define_metric("*", step_metric="iteration")
        if new and graph is not None:
            self._run.log({"graph": wandb.Html(draw.svg(graph), inject=False)}, step=0)

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Sends one iteration."""
        # wandb accepts each step only once. With two steps per iteration, the final pass gets the odd step before that
        # of a continued run's first iteration.
        self._step = 2 * iteration - (iteration >= self._iterations)
        self._run.log({"iteration": iteration, **metrics}, step=self._step)
        if self._tables:
            self._tables.add(iteration)

    def sync(self) -> None:
        """Sends the tables of new records, and checkpoints that were saved since the last call."""
        rows = self._tables.take() if self._tables else []
        if rows:
            self._run.log({"rollouts": self._wandb.Table(columns=list(COLUMNS), data=rows)}, step=self._step)
        if self._settings.checkpoints:
            self._send_checkpoints()

    def _send_checkpoints(self) -> None:
        note = self._path / "wandb_sent"
        sent = note.read_text(encoding="utf-8").strip() if note.exists() else ""
        for checkpoint in (p for p in numbered(self._path / "checkpoints") if p.name > sent):
            name = re.sub(r"[^\w.-]", "-", f"{self._path.name}-checkpoint")
            artifact = self._wandb.Artifact(name, type="checkpoint", metadata={"iteration": int(checkpoint.name)})
            artifact.add_dir(str(checkpoint))  # copied: the run deletes old checkpoints
            self._run.log_artifact(artifact, aliases=[f"iteration-{int(checkpoint.name)}"])
            write_aside(note, checkpoint.name)

    def close(self) -> None:
        """Ends the wandb run."""
        self.sync()
        self._run.finish()
        # `finish` asks wandb's process to end the run's file and does not wait, so its last rows may still be missing.
        self._wandb.teardown()


class TensorBoard:
    """Writes metrics, rollouts (as text) and the graph (as a picture) to event files.

    A continued run overwrites the iterations that it repeats.

    Args:
        folder: folder of the event files.
        graph: drawn at the first iteration.
        tables: rollouts to show.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, graph: Graph | None = None, tables: RolloutTables | None = None) -> None:
        with _tensorboard_extra():
            import vl_convert  # noqa: F401  # draws the graph at the first iteration
            from torch.utils.tensorboard import SummaryWriter
        self._make: Callable[..., Any] = SummaryWriter
        self._writer: Any = None
        self._folder = folder
        self._graph = graph
        self._tables = tables

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Writes one iteration."""
        if self._writer is None:
            # In a continued run, TensorBoard hides values of this and later iterations that an earlier part wrote.
            with writing(self._folder):
                self._writer = self._make(str(self._folder), purge_step=iteration)
            if self._graph is not None and iteration == 0:
                self._writer.add_image("graph", _picture(self._graph), 0, dataformats="HWC")
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        if self._tables:
            self._tables.add(iteration)

    def sync(self) -> None:
        """Writes the rollouts of new records, and flushes everything to the disk."""
        if self._writer is None:
            return
        rows = self._tables.take() if self._tables else []
        for iteration in dict.fromkeys(row[0] for row in rows):
            text = "\n\n---\n\n".join(_as_text(row) for row in rows if row[0] == iteration)
            self._writer.add_text("rollouts", text, iteration)
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        self.sync()
        if self._writer is not None:
            self._writer.close()


def _wandb_extra(mode: str) -> AbstractContextManager[None]:
    return extra("wandb", f"run.wandb.mode={mode}", "set run.wandb.mode=disabled")


def _tensorboard_extra() -> AbstractContextManager[None]:
    return extra("tensorboard", "run.tensorboard.enabled=true", "set run.tensorboard.enabled=false")


def check_sinks(settings: Any) -> None:
    """Raises ConfigError if a run's settings (`RunSettings`) ask for a sink whose package is missing; imports none."""
    if settings.tensorboard.enabled:
        with _tensorboard_extra():
            find_package("tensorboard")
            find_package("vl_convert")
    if settings.wandb.mode != "disabled":
        with _wandb_extra(settings.wandb.mode):
            find_package("wandb")


def make_sinks(settings: Any, run_path: Path, config: dict[str, Any], graph: Graph) -> list[Sink]:
    """The sinks that a run's settings (`RunSettings`) ask for."""

    def tables() -> RolloutTables:  # one per sink: each keeps what it has still to send
        return RolloutTables(run_path, graph, settings.tables, settings.record)

    sinks: list[Sink] = []
    if settings.tensorboard.enabled:
        sinks.append(TensorBoard(run_path / "tensorboard", graph=graph, tables=tables()))
    if settings.wandb.mode != "disabled":
        sinks.append(
            Wandb(settings.wandb, run_path, config, graph=graph, tables=tables(), iterations=settings.iterations)
        )
    return sinks


def _picture(graph: Graph) -> Any:
    """uint8 [height, width, 3] of the graph."""
    import numpy as np
    import vl_convert
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(vl_convert.svg_to_png(draw.svg(graph), scale=2))).convert("RGB"))


def _as_text(row: list[Any]) -> str:
    """Markdown in which a rollout's own text is a block of code, whatever it contains."""
    named = dict(zip(COLUMNS, row, strict=True))
    long = {key: named.pop(key) for key in ("problem", "response", "reason")}
    head = "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in named.items()
    )
    return "\n\n".join(_code(text) for text in (head, *(f"{key}: {value}" for key, value in long.items())))


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
