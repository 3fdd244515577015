"""Small cases worked out by hand, and what must hold for all plans."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.app.cli import main
from pipeline.app.cluster.measured import Generating, fit_curve, measure, scaled
from pipeline.app.cluster.simulate import Curve, Draws, Plan, Stage, simulate
from pipeline.app.report.source import read_run
from pipeline.core.errors import ConfigError, RunError

UNIT = Curve(floor=1.0, each=0.0)


def plan(lengths=(5.0,), rows=1, learn=3.0, **more):
    stages = (Stage(name="sampler", rows=rows, tokens=Draws(tuple(lengths))),)
    return Plan(stages=stages, learn=Draws((learn,)), **{"curve": UNIT, **more})


class TestByHand:
    def test_one_wire_back_takes_the_sum(self):
        # 5 tokens at 1 s, learning 3 s, other 1 s: 9 s, the server busy for 5 of them and the learner for 3.
        found = simulate(plan(other=Draws((1.0,))))
        assert found.seconds == [9.0] * 10
        assert (found.engine_busy, found.learner_busy) == pytest.approx((5 / 9, 3 / 9))
        # Two GPUs, one idle at any time: of 18 GPU seconds 8 are used.
        assert found.bubble == pytest.approx(10 / 18)

    @pytest.mark.parametrize(("learn", "expected"), [(3.0, 5.0), (7.0, 8.0)])
    def test_two_back_take_the_longer_side(self, learn, expected):
        # Generation 5 s; learning 3 or 7 s and other 1 s.
        found = simulate(plan(learn=learn, other=Draws((1.0,)), delay=2))
        assert found.seconds == [expected] * 9

    def test_the_pipeline_fills_before_it_is_full(self):
        # @2, generation 5, learning 7: iteration 0 ends at 12, then one ends every 7.
        found = simulate(plan(learn=7.0, delay=2))
        assert found.seconds == [7.0] * 9
        assert found.learner_busy == 1.0
        assert found.engine_busy == pytest.approx(5 / 7)

    def test_weights_bound_a_slow_learner(self):
        # Slow and fast iterations of generation in turn cannot be evened out further than the wire allows.
        uneven = replace(plan(learn=4.0), stages=(Stage(name="sampler", rows=0, seconds=Draws((1.0, 7.0))),))
        one, two, three = (simulate(replace(uneven, delay=k), 200).iteration for k in (1, 2, 3))
        assert one == pytest.approx(8.0, rel=0.1)
        assert 4.0 < three <= two < one

    def test_colocated_never_overlaps(self):
        found = simulate(plan(delay=2, shared=True))
        assert found.seconds == [8.0] * 9
        assert found.bubble == pytest.approx(0.0)

    def test_an_update_stops_the_servers(self):
        assert simulate(plan(update=Draws((2.0,)))).seconds == [10.0] * 10
        assert simulate(plan(update=Draws((2.0,)), delay=2)).seconds == [7.0] * 9

    def test_running_sequences_share_a_server(self):
        # A step takes 1 s per running sequence. Of rows with 2 and with 4 tokens: both run for 2 tokens of 2 s each; of
        # 2 and 4 one then runs for 2 tokens of 1 s.
        found = simulate(plan((2.0, 4.0), rows=2, learn=0.0, curve=Curve(floor=0.0, each=1.0)), 40)
        took = {6: 6.0, 4: 4.0, 8: 8.0}  # tokens of both → seconds
        assert found.seconds == [took[tokens] for tokens in found.tokens[2:]]
        assert set(found.tokens) == set(took)

    def test_rows_beyond_the_slots_wait(self):
        # Three rows of 2 tokens on two slots, a step of 1 + 2 s with two and 1 + 1 s with one running: 2·3 + 2·2.
        assert simulate(plan((2.0,), rows=3, learn=0.0, curve=Curve(floor=1.0, each=1.0, slots=2))).seconds[0] == 10.0

    def test_rows_go_to_the_server_with_the_fewest(self):
        # Four equal rows on two servers: two each, 2 s a step, 3 tokens.
        assert simulate(plan((3.0,), rows=4, learn=0.0, curve=Curve(floor=0.0, each=1.0), servers=2)).seconds[0] == 6.0

    def test_replicas_share_workers_and_wait_for_each_other(self):
        # 5 rows on 2 replicas: 3 and 2; two workers of each take 1 s a row: 2 s, then 1 s; the learner waits for the
        # slower.
        stage = Stage(name="rewards", rows=5, row_seconds=1.0, workers=2)
        assert simulate(replace(plan(replicas=2, servers=2, own_servers=True), stages=(stage,))).seconds[0] == 5.0

    def test_own_servers_are_not_lent(self):
        # Replica 0 has rows of 2 replicas' 3: it takes 2 rows of 2 tokens on one server (2 s a step), replica 1 one
        # row.
        own = plan((2.0,), rows=3, learn=0.0, curve=Curve(floor=0.0, each=1.0), servers=2, replicas=2, own_servers=True)
        assert simulate(own).seconds[0] == 4.0


PLANS = st.builds(
    lambda rows, servers, replicas, delay, slots, lengths, learn: plan(
        tuple(lengths), rows, learn, servers=servers, replicas=replicas, delay=delay, curve=Curve(floor=0.5, each=0.1, slots=slots)
    ),
    st.integers(1, 30), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 8),
    st.lists(st.integers(1, 50).map(float), min_size=1, max_size=5), st.floats(0, 20),
)  # fmt: skip


class TestAlways:
    @settings(max_examples=25, deadline=None)
    @given(PLANS)
    def test_what_goes_in_comes_out(self, drawn):
        found = simulate(drawn, 8)
        assert found.rows == [drawn.stages[0].rows] * 8
        span = sum(found.seconds)
        least, most = min(drawn.stages[0].tokens.values), max(drawn.stages[0].tokens.values)
        assert all(least * n <= t <= most * n for t, n in zip(found.tokens, found.rows, strict=True))
        assert 0 <= found.engine_busy <= 1 + 1e-9
        assert 0 <= found.learner_busy <= 1 + 1e-9
        assert found.learner_busy * span == pytest.approx(
            drawn.learn.mean * len(found.seconds), rel=0.4, abs=drawn.learn.mean + 1e-6
        )
        assert min(found.seconds) >= drawn.learn.mean - 1e-6

    @settings(max_examples=12, deadline=None)
    @given(PLANS)
    def test_the_same_plan_has_one_result_whatever_the_replicas(self, drawn):
        assert simulate(drawn, 6) == simulate(drawn, 6)
        assert simulate(drawn, 6).tokens == simulate(replace(drawn, replicas=1), 6).tokens

    @settings(max_examples=12, deadline=None)
    @given(PLANS)
    def test_longer_wires_and_faster_parts_are_never_slower(self, drawn):
        def seconds(changed):
            return sum(simulate(changed, 30).seconds) / len(simulate(changed, 30).seconds)

        base = seconds(drawn) * 1.02 + 1e-9  # the window moves by an iteration
        one = replace(drawn, delay=1)
        assert seconds(replace(drawn, learn=drawn.learn.scaled(0.5))) <= base
        assert seconds(replace(drawn, curve=replace(drawn.curve, floor=0.25))) <= base
        assert seconds(replace(one, delay=2)) <= seconds(one) * 1.02 + 1e-9

    def test_tokens_of_a_full_server_are_its_peak(self):
        full = plan((10.0,), rows=4, learn=0.0, curve=Curve(floor=1.0, each=0.5, slots=4))
        assert simulate(full).engine_full == pytest.approx(1.0)


class TestRefusals:
    def test_too_few_iterations(self):
        with pytest.raises(ConfigError, match=r"3 iterations with weights@2; wanted more than 3"):
            simulate(plan(delay=2), 3)

    def test_no_servers(self):
        with pytest.raises(
            ConfigError, match="0 servers with 256 slots, 1 replicas, weights@1; wanted at least one of each"
        ):
            plan(servers=0)

    def test_servers_that_replicas_cannot_share(self):
        with pytest.raises(ConfigError, match="3 servers of 2 replicas; wanted a multiple"):
            plan(servers=3, replicas=2, own_servers=True)

    def test_negative_lengths(self):
        with pytest.raises(ConfigError, match="at least 0"):
            Draws((-1.0,))


def test_a_lognormal_has_its_median_and_its_cut():
    draws = Draws.lognormal(1000.0, 0.8, 4000.0)
    assert np.median(draws.values) == pytest.approx(1000.0, rel=0.01)
    assert max(draws.values) == 4000.0


def test_the_curve_is_found_again():
    # seconds = 0.002 · longest + 0.0001 · tokens
    rng = np.random.default_rng(0)
    longest = {i: float(x) for i, x in enumerate(rng.integers(50, 100, 20))}
    tokens = {i: float(x) for i, x in enumerate(rng.integers(1000, 9000, 20))}
    seconds = {i: 0.002 * longest[i] + 0.0001 * tokens[i] for i in longest}
    curve = fit_curve([Generating("sampler", 16, seconds, tokens, longest, Draws())])
    assert (curve.floor, curve.each) == pytest.approx((0.002, 0.0001))


def test_a_curve_never_falls():
    # Longer rows take less time here, so only tokens explain the seconds.
    curve = fit_curve(
        [
            Generating(
                "sampler", 2, {0: 1.0, 1: 2.0, 2: 3.0}, {0: 10.0, 1: 20.0, 2: 30.0}, {0: 9.0, 1: 5.0, 2: 1.0}, Draws()
            )
        ]
    )
    assert (curve.floor, curve.each) == pytest.approx((0.0, 0.1))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on paper: the files of a toy GRPO run with seconds that are known."""
    from pipeline.run.compose import compose

    folder = tmp_path_factory.mktemp("measured") / "run"
    folder.mkdir()
    config = compose(["recipe=toy_grpo", "run.name=run"])
    (folder / "config.yaml").write_text(json.dumps(config))
    row = {
        "seconds/sampler": 4.0,
        "sampler/sampled_tokens": 1000.0,
        "seconds/learner": 2.0,
        "seconds/rewards": 0.5,
        "seconds/engine": 0.25,
    }
    rows = [
        {"iteration": i, **row, "learner/trained_tokens": 500.0, "seconds/executor": 0.25, "seconds/iteration": 7.0}
        for i in range(6)
    ]
    rows[0]["seconds/sampler"] = 100.0  # loads and compiles: left out
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_a_run_without_records_keeps_its_seconds_and_says_so(run):
    found = measure(read_run(run))
    assert found.seconds == [7.0] * 5
    assert found.notes == ["sampler recorded nothing that tells its lengths; its seconds are kept whatever the size."]
    assert simulate(found.plan).seconds == pytest.approx([7.0] * 10)  # 0.25 + 4 + 0.5 + 2 + 0.25
    assert simulate(replace(found.plan, delay=2)).seconds == pytest.approx([4.75] * 9)


def test_a_run_of_two_iterations_is_too_short(run, tmp_path):
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f"{line}\n" for line in (run / "metrics.jsonl").read_text().splitlines()[:2])
    )
    with pytest.raises(RunError, match="1 iterations after the first; wanted at least 3"):
        measure(read_run(tmp_path))


def test_more_rollouts_grow_every_stage():
    two = Plan(stages=(Stage(name="a", rows=40), Stage(name="b", rows=10), Stage(name="c", rows=0)), curve=UNIT)
    assert [s.rows for s in scaled(two, 80, 40).stages] == [80, 20, 0]


class TestCommand:
    def test_the_run_itself_at_every_delay(self, run, capsys):
        assert main(["simulate", "--measured", str(run), "--delays", "1", "2"]) == 0
        printed = capsys.readouterr().out
        assert "note: sampler recorded nothing that tells its lengths" in printed
        assert f"{run}: measured at weights@1, median 7.000 s an iteration" in printed
        rows = [line.split("|")[1:3] for line in printed.splitlines() if line.startswith("| weights")]
        assert [[cell.strip() for cell in row] for row in rows] == [["weights@1", "7.00"], ["weights@2", "4.75"]]

    def test_json_and_picture(self, run, tmp_path, capsys):
        arguments = ["--json", str(tmp_path / "rows.json"), "--picture", str(tmp_path / "rows.svg")]
        assert main(["simulate", "--measured", str(run), *arguments]) == 0
        assert [row["seconds"] for row in json.loads((tmp_path / "rows.json").read_text())] == pytest.approx(
            [7.0, 4.75]
        )
        assert "<svg" in (tmp_path / "rows.svg").read_text()

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["recipe=toy_srpo"], "simulate: found recipe=toy_srpo; wanted cluster=NAME"),
            (["--model", "qwen2.5-7b", "--device", "h1000"], "--device h1000: wanted one of h100"),
            (["--model", "qwen2.5-7b"], "no node that asks an engine and records its rows; wanted run.record.every=1"),
            (["--picture", "rows.pdf"], "--picture rows.pdf: wanted a name that ends in .svg or .png"),
        ],
    )
    def test_mistakes(self, run, arguments, text, capsys):
        assert main(["simulate", "--measured", str(run), *arguments]) == 2
        assert text in capsys.readouterr().err
