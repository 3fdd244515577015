"""`creditgraph status RUN …`: progress of a run, the state of its SLURM jobs, and their logs."""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from creditgraph.pipeline.app.cluster.logs import follow, newest_start
from creditgraph.pipeline.app.cluster.slurm import ENDED, NOTES, Note, State, states
from creditgraph.pipeline.app.text import visible
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.run.run_directory import lock_holder
from creditgraph.pipeline.run.timeline.heartbeat import where

SUMMARY = "Show the progress of runs, the state of their SLURM jobs, and their logs."
_TAIL_BYTES = 65536  # read from the end of a metrics file to get its last line


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph status runs/toy_srpo-s0\n"
        "  creditgraph status runs/toy_srpo-s0 --logs learner -n 50\n"
        "  creditgraph status runs/toy_srpo-s0 --logs -f"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument(
        "--logs",
        nargs="?",
        const="",
        metavar="ROLE",
        help="show the end of the logs of the newest start; of one role: job, learner, engine-0",
    )
    parser.add_argument("-n", "--lines", type=int, default=20, help="with --logs: lines of each log (default: 20)")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="with --logs: print what is appended to the learner's or first log"
    )


def main(options: argparse.Namespace) -> int:
    """Prints one paragraph per run, or its logs."""
    runs = [Path(run) for run in options.runs]
    if options.follow and (options.logs is None or len(runs) > 1):
        raise ConfigError(f"status -f: expected --logs and one run directory, got {len(runs)}.")
    for run in runs:
        if options.logs is None:
            print(describe(run))
        else:
            _show_logs(run, options.logs, options.lines, options.follow)
    return 0


def describe(run: Path) -> str:
    """Describes jobs, progress, and the reason of the last end; for a run that was not submitted, its process."""
    # The process that runs it holds the lock; for a submitted run SLURM has more information.
    if (run / "config.yaml").exists() and not any((run / name).exists() for name in NOTES.values()):
        holder = lock_holder(run / "lock")
        running = f"run by {holder}" if holder else "not running"
        return "\n".join([f"{run}  (not submitted; {running})", *_progress(run)])
    lines = []
    for kind, note in Note.all(run).items():
        lines.append(f"{run}  ({'evaluation, ' if kind == 'eval' else ''}cluster {note.cluster or 'one_node'})")
        known = states(note.jobs)
        for state in known:
            lines += _job_lines(state)
        if not known:
            lines.append(f"  jobs {', '.join(note.jobs)}: no longer known to SLURM")
        if kind == "job":
            lines += _progress(run)
        ended = run / ENDED[kind]
        if ended.exists():
            lines.append(f"  {ended.read_text().strip()}")
    return "\n".join(lines)


def _job_lines(state: State) -> list[str]:
    where = f" on {state.nodes}" if state.nodes else ""
    why = f" ({state.reason})" if state.reason else ""
    line = (
        f"  job {state.job}: {state.state.lower()}{why}, {state.elapsed} in this start, {state.restarts} "
        f"restarts{where}"
    )
    return [line, f"  {state.advice}"] if state.advice else [line]


def _progress(run: Path) -> list[str]:
    """The number of iterations done, and the activity of the ranks."""
    metrics = run / "metrics.jsonl"
    last = _last_metrics(metrics)
    place = where(run)
    lines = [f"  {_reached(run, last)}{_age(metrics)}"] if last else []
    return lines + ([f"  {place}"] if place else [])


def _reached(run: Path, last: dict[str, Any]) -> str:
    """Such as "iteration 39 done (40 of 60)", from the last line of metrics.jsonl and the run's configuration."""
    iteration = last.get("iteration")
    if not isinstance(iteration, int):
        return "iteration ? done"
    try:
        total = int(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["run"]["iterations"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return f"iteration {iteration} done"
    # The final pass has the number of iterations as its index, and follows the last of them.
    if iteration >= total:
        return f"all {total} iterations and the final evaluation done"
    return f"iteration {iteration} done ({iteration + 1} of {total})"


def _age(path: Path) -> str:
    """Such as " 12 s ago", both times by the clock of the file's server: this host's may differ."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as now:
            seconds = os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
    except OSError:
        seconds = time.time() - path.stat().st_mtime
    if seconds < -1:
        return (
            f"; its file is dated {-seconds:.0f} s in the future: compare clocks with "
            f"`creditgraph doctor --shared {path.parent}`"
        )
    return f" {max(0.0, seconds):.0f} s ago"


def _last_metrics(path: Path) -> dict[str, Any]:
    """The last whole line of a metrics file, {} without one."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = handle.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            return row
    return {}


def _show_logs(run: Path, role: str, count: int, following: bool) -> None:
    files = [file for file in newest_start(run) if role in file.name]
    if not files:
        raise RunError(
            f"{run / 'logs'}: no {role + ' ' if role else ''}log; expected the directory of a submitted run that has "
            "started."
        )
    if following:
        learner = next((file for file in files if file.name.startswith("learner")), files[0])
        for line in follow(learner):
            print(visible(line), flush=True)
    for file in files:
        lines = file.read_text(errors="replace").splitlines()
        part = f" (last {count} of {len(lines)} lines)" if len(lines) > count else ""
        print(f"── {file.name}{part}")
        for line in lines[-count:]:
            print(visible(line))
