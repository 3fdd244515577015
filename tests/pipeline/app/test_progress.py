import io

import pytest

from creditgraph.pipeline.app.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_output_has_one_line_per_iteration():
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        for iteration in range(2):
            progress.node_started("engine", iteration)
            progress.node_started("learner", iteration)
            progress.iteration_done(
                iteration, {"rewards/mean": 0.25, "engine/sampled_tokens": 3000.0, "seconds/iteration": 2.0}
            )
        progress.iteration_done(2, {"evaluator/accuracy": 0.5})
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("iteration 0 (1/2)  reward 0.250  tokens/s 1,500  seconds 2.00  eta ")
    assert lines[2] == "final evaluation  accuracy 0.500"
    assert len(lines) == 3


def test_metrics_that_are_not_logged_are_left_out():
    stream = io.StringIO()
    with Progress(10, start=4, stream=stream) as progress:
        progress.iteration_done(4, {"other/mean": 0.25})
    assert stream.getvalue().startswith("iteration  4 ( 5/10)  done  eta ")


def test_a_terminal_shows_the_lines_of_a_pipe_and_a_bar():
    stream = Terminal()
    pipe = io.StringIO()
    for target in (stream, pipe):
        with Progress(8, stream=target) as progress:
            progress.node_started("sampler", 0)
            progress.iteration_done(0, {"rewards/mean": 0.125, "evaluator/accuracy": 0.5, "seconds/iteration": 1.0})
            progress.node_started("learner", 1)
            progress.iteration_done(1, {"rewards/mean": 0.375, "seconds/iteration": 1.0})
            progress.iteration_done(8, {"evaluator/accuracy": 0.75})
    shown = stream.getvalue()
    lines = pipe.getvalue().splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.partition("  eta ")[0] in shown  # the estimate differs
    for text in ("8/8 done", "learner"):
        assert text in shown
    assert progress._live is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (90000, "25h00m")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
