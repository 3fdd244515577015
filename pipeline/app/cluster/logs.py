"""The logs of the jobs of a run, in its directory."""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# job-JOB, and ROLE-JOB-START-NODE of its steps; START.AGAIN of a learner that was restarted inside the allocation.
_NAME = re.compile(r"(?P<role>job|eval|learner|engine-\d+)-(?P<job>\d+)(-(?P<start>\d+)(\.(?P<again>\d+))?-.+)?")
_TAIL_BYTES = 4096  # shown before following


@dataclass(frozen=True)
class _Log:
    file: Path
    role: str
    job: int
    start: int  # number of restarts of the job before it; -1 for a job's own log, which has all starts
    again: int  # number of restarts in the same start


def newest_start(run: Path) -> list[Path]:
    """The logs of the newest start, the job's first, then the learner's.

    For training, the newest start is that of the job that last held the run's lock (a refused job has a newer number);
    for evaluation, the newest job. They are ordered by the numbers in their names, because clocks of nodes may differ.
    """
    files = sorted((run / "logs").glob("*.log"))
    named = [(file, _NAME.fullmatch(file.stem)) for file in files]
    logs = [_Log(file, m["role"], int(m["job"]), int(m["start"] or -1), int(m["again"] or 0)) for file, m in named if m]
    training = [log for log in logs if log.role != "eval"]
    evaluation = [log for log in logs if log.role == "eval"]
    unnamed = [file for file, match in named if not match]
    return _of_newest_start(training, _holder(run)) + _of_newest_start(evaluation, -1) + unnamed


def _of_newest_start(logs: list[_Log], holder: int) -> list[Path]:
    # The job that holds the run may have written no log yet; then the newest log is shown.
    jobs = {log.job for log in logs}
    job = holder if holder in jobs else max(jobs, default=-1)
    own = [log for log in logs if log.job == job]
    start = max((log.start for log in own), default=-1)
    chosen = [log for log in own if log.start in (-1, start)]
    last = {role: max(log.again for log in chosen if log.role == role) for role in {log.role for log in chosen}}
    chosen = [log for log in chosen if log.again == last[log.role]]
    chosen.sort(key=lambda log: (log.role != "job", log.role != "learner", log.file.name))
    return [log.file for log in chosen]


def _holder(run: Path) -> int:
    """Number of the job that last held the run, -1 if none is known."""
    try:
        return int((run / "holder").read_text())
    except (OSError, ValueError):
        return -1


def follow(file: Path) -> Iterator[str]:
    """Yields the last lines, then appended ones, without end."""
    # Polled, because inotify does not report writes of other nodes to a shared folder.
    with file.open(errors="replace") as handle:
        handle.seek(max(0, os.path.getsize(file) - _TAIL_BYTES))
        while True:
            line = handle.readline()
            if line:
                yield line.rstrip("\n")
            else:
                time.sleep(0.5)
