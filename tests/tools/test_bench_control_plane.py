"""What ranks say to each other does not grow with their number, but by a message for every doubling on rank 0."""

import json
import os
import subprocess
import sys
from pathlib import Path

from stub_pools import route

ROOT = Path(__file__).resolve().parent.parent.parent


def test_work_per_rank_is_constant_and_rank_0_takes_in_one_report_per_doubling(tmp_path):
    command = [
        str(ROOT / "tools" / "bench_control_plane"),
        "--worlds",
        "2",
        "4",
        "8",
        "--iterations",
        "4",
        "--json",
        str(tmp_path / "found"),
    ]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    two, four, eight = json.loads((tmp_path / "found").read_text())
    # One to agree to go on; size and text of a report from each of log2(ranks) others.
    assert [x["collectives"] for x in (two, four, eight)] == [3, 5, 7]
    # A report is less than a kilobyte; a rank that gathered all of them would get two more at four ranks, and four more
    # at eight.
    report = two["rank0_received"]
    assert four["rank0_received"] < 2.5 * report
    assert eight["rank0_received"] < 3.5 * report
    assert eight["median_sent"] < 2 * report
    assert eight["total"] < 8 * 2 * report


def test_leaders_share_servers_evenly_and_a_check_serves_as_many_as_there_are(tmp_path):
    few, many = (route(n, n, prompts=2, group=16, seconds=7.0, folder=tmp_path) for n in (2, 8))
    assert (few.fullest, many.fullest) == (1.0, 1.0)
    assert 0 < many.checks < 3 * few.checks
