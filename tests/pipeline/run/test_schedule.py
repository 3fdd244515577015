"""Wires '@<=k': the newest value that is there, never older than k iterations, and repeatable from what was written."""

import json
import time
from itertools import product

import pytest
import toy_graph as toy

from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.sockets import Wire
from creditgraph.pipeline.run.checkpoint import CheckpointSettings
from creditgraph.pipeline.run.executor import Executor, RunSettings
from creditgraph.pipeline.run.run_directory import RunDirectory
from creditgraph.pipeline.run.schedule import SCHEDULE, Schedule

SECONDS = {"learner": (0.0, 0.05, 0.0, 0.0), "score": (0.02, 0.0, 0.0, 0.03, 0.0)}  # by iteration, in turn


class Sleeps:
    """Makes nodes slow by turns, and lanes overtake each other."""

    def __init__(self, seconds=SECONDS, end=10**9):
        self.seconds, self.end = seconds, end

    def node_started(self, node, iteration):
        pattern = self.seconds.get(node, (0.0,))
        time.sleep(pattern[iteration % len(pattern)])

    def iteration_done(self, iteration, metrics):
        if iteration == self.end:
            raise KeyboardInterrupt


def train(path, delay="<=3", iterations=16, observer=None, **settings):
    run_settings = RunSettings(iterations=iterations, checkpoint=CheckpointSettings(every=3), **settings)
    with (
        RunDirectory.open(path, {"nodes": {"delay": delay}}) as run,
        Executor(toy.make_graph(delay), run_settings, run=run, observer=observer or Sleeps()) as executor,
    ):
        executor.setup()
        executor.restore()
        return executor.run()


def read(path):
    """Iteration → which one's weights it read."""
    rows = [json.loads(line) for line in (path / SCHEDULE).read_text().splitlines()]
    assert {row["wire"] for row in rows} == {"learner.weights@<=3"}
    assert len({row["iteration"] for row in rows}) == len(rows)
    return {row["iteration"]: row["reads"] for row in rows}


def bits(path, iteration=15):
    """What is computed: metrics without times, and the newest checkpoint."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    times = ("seconds/", "utilisation/")
    stable = [{k: v for k, v in row.items() if not k.startswith(times)} for row in rows]
    return stable, (path / "checkpoints" / f"{iteration:06d}" / "tensors.safetensors").read_bytes()


def test_reads_the_newest_within_the_bound_and_says_which(tmp_path):
    train(tmp_path / "free")
    lags = [iteration - tag for iteration, tag in sorted(read(tmp_path / "free").items())]
    assert len(lags) == 16
    assert set(lags) <= {1, 2, 3}
    assert len(set(lags)) > 1
    # The version is that of the rows: weights of iteration i have version i + 1, and 0 before the first.
    versions = [row["score/version"] for row in bits(tmp_path / "free")[0] if "score/version" in row]
    assert versions[:16] == [max(0, tag + 1) for _, tag in sorted(read(tmp_path / "free").items())]


@pytest.mark.slow
def test_a_schedule_gives_the_same_bits_at_other_speeds(tmp_path):
    train(tmp_path / "free")
    given = str(tmp_path / "free" / SCHEDULE)
    for name, seconds in (("even", {}), ("slow learner", {"learner": (0.04,)})):
        train(tmp_path / name, observer=Sleeps(seconds), schedule=given)
        assert bits(tmp_path / name) == bits(tmp_path / "free")
    train(tmp_path / "own", observer=Sleeps({"learner": (0.04,)}))
    assert bits(tmp_path / "own") != bits(tmp_path / "free")


def test_a_run_that_was_ended_repeats_what_it_had_chosen(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(path, observer=Sleeps(end=7))  # the newest checkpoint is of iteration 5
    before = read(path)
    assert max(before) > 5
    with (path / SCHEDULE).open("a") as file:
        file.write('{"iteration": 12, "wi')  # half a line
    train(path, observer=Sleeps({"score": (0.03,)}))
    after = read(path)
    assert before.items() <= after.items()
    train(tmp_path / "whole", schedule=str(path / SCHEDULE))
    assert bits(tmp_path / "whole") == bits(path)


def test_without_overlap_it_is_the_iteration_before(tmp_path):
    train(tmp_path / "bound", overlap=False)
    train(tmp_path / "one", delay=1)
    assert bits(tmp_path / "bound")[0] == bits(tmp_path / "one")[0]


def test_a_schedule_that_does_not_fit_is_a_sentence(tmp_path):
    file = tmp_path / "given.jsonl"
    row = {"iteration": 0, "wire": "learner.weights@<=3", "reads": -1}
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"given\.jsonl: no line for 'learner\.weights@<=3' in iteration 1; expected"):
        train(tmp_path / "short", schedule=str(file))
    file.write_text(json.dumps(row | {"reads": -4}) + "\n")
    with pytest.raises(ConfigError, match=r"-4 for .* in iteration 0; expected an iteration from -3 to -1"):
        train(tmp_path / "old", schedule=str(file))
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1 is no choice of a run"):
        train(tmp_path / "other", schedule=str(file))
    with pytest.raises(ConfigError, match=r"missing\.jsonl cannot be read"):
        train(tmp_path / "none", schedule=str(tmp_path / "missing.jsonl"))


def test_choices_are_by_wire_and_iteration():
    schedule = Schedule(None, writes=False)
    wires = [Wire("learner", "weights", k, newest=True) for k in (2, 3)]
    for wire, iteration in product(wires, range(5, 8)):
        schedule.choose(wire, iteration, iteration - wire.delay)
    assert [schedule.known(w, i) for w, i in product(wires, (5, 7, 8))] == [3, 5, None, 2, 4, None]
