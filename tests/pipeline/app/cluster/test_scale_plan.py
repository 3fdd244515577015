"""Servers and splits of a hypothetical fleet, from a run on paper."""

from dataclasses import replace

import pytest

from pipeline.app.cluster.layout_plan import DEVICES, SHAPES
from pipeline.app.cluster.measured import Measured
from pipeline.app.cluster.scale_plan import Fleet, decode_curve, scale
from pipeline.app.cluster.simulate import Curve, Draws, Plan, Stage
from pipeline.core.errors import ConfigError

SMALL, H100 = SHAPES["qwen2.5-7b"], DEVICES["h100"]


@pytest.fixture(scope="module")
def measured():
    stages = (
        Stage(name="sampler", rows=16, tokens=Draws((50.0, 100.0, 150.0))),
        Stage(name="rewards", rows=16, row_seconds=1e-3),
    )
    plan = Plan(stages=stages, curve=Curve(floor=1e-3, each=1e-4), learn=Draws((1.0,)))
    return Measured(plan, [3.0], ["sampler"], 16, 1.0, [])


@pytest.fixture(scope="module")
def found(measured):
    return list(scale(measured, Fleet(shape=SMALL, device=H100, rollouts=128, length=256, prompt=64), [8, 16]))


def test_a_server_reads_its_weights_once_per_step():
    # Weights of 2 bytes at 70 % of 3.35 TB/s, and a millisecond; keys and values of 1,000 tokens: 28 layers · 4 heads ·
    # 128 · 2 · 2 bytes.
    curve = decode_curve(SMALL, H100, 1, 1000)
    rate = 0.7 * 3.35e12
    assert curve.floor == pytest.approx(2 * SMALL.parameters / rate + 1e-3)
    products = 2 * SMALL.active_parameters / (0.6 * 989e12)
    assert curve.each == pytest.approx(28 * 4 * 128 * 4 * 1000 / rate + products)
    assert curve.slots == 256  # 57 GB are left, a sequence takes 57 MB: memory for 990


def test_two_gpus_read_half_each():
    one, two = (decode_curve(SMALL, H100, n, 1000) for n in (1, 2))
    assert two.floor - 1e-3 == pytest.approx((one.floor - 1e-3) / 2)


def test_a_model_that_fills_the_memory_is_refused():
    with pytest.raises(
        ConfigError, match=r"llama3-70b takes 141 GB on each of 1 × h100.*Set cluster.gpus_per_server higher"
    ):
        decode_curve(SHAPES["llama3-70b"], H100, 1, 1000)


def test_all_modes_of_every_size(found):
    assert [(f.gpus, f.mode) for f in found] == [
        (g, m) for g in (8, 16) for m in ("colocated", "weights@1", "weights@2")
    ]
    for f in found:
        assert f.engine_gpus + f.learner_gpus == (2 * f.gpus if f.mode == "colocated" else f.gpus)
        assert 0 <= f.simulated.bubble <= 1
        assert f.simulated.rows[0] == 128


def test_overlap_beats_taking_turns_and_more_gpus_beat_fewer(found):
    seconds = {(f.gpus, f.mode): f.simulated.iteration for f in found}
    for gpus in (8, 16):
        assert seconds[gpus, "weights@2"] < seconds[gpus, "weights@1"]
    for mode in ("colocated", "weights@1", "weights@2"):
        assert seconds[16, mode] <= seconds[8, mode] * 1.001


def test_rollouts_per_gpu_grow_with_the_fleet(measured):
    fleet = Fleet(shape=SMALL, device=H100, rollouts=4, per_gpu=True, length=64, prompt=64)
    found = list(scale(measured, fleet, [8, 16], [2]))
    assert [f.simulated.rows[0] for f in found] == [32, 32, 64, 64]


def test_a_run_without_rollouts_is_refused(measured):
    with pytest.raises(ConfigError, match="no node that asks an engine and records its rows"):
        list(scale(replace(measured, rows=0), Fleet(shape=SMALL, device=H100), [8]))
