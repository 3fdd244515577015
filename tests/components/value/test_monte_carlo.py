"""Monte-Carlo values: by hand, seeds, telescoping, bad verdicts, no budget."""

import pytest
import torch

from creditgraph.components.advantage.gae import GAE
from creditgraph.components.value.boundaries import values_from_gains
from creditgraph.components.value.monte_carlo import MonteCarlo, continuation_seeds
from creditgraph.pipeline.core.handles import ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments
from creditgraph.pipeline.core.streams import Stream

STOP = "</thought>"
TWO = f"a{STOP}b{STOP}"


def _case(toolbox, texts, reward, **settings):
    """Thought segments; continuations of a state are `1` and `0` in turn, and the verifier reads the last character."""
    trajectories = toolbox.trajectories(texts, prompt_uid=torch.full((len(texts),), 100))
    policy = toolbox.policy(lambda context, n: f"{n % 2}\\boxed{{{n % 2}}}{STOP}")
    return toolbox.start(MonteCarlo, **settings), {
        "prompts": toolbox.prompts(["P"]),
        "trajectories": trajectories,
        "segments": Segments(uid=trajectories.uid, ends=trajectories.thought_ends),
        "rewards": toolbox.rewards(trajectories.uid, reward),
        "verifier": toolbox.verifier(lambda text: float(f"boxed{{1}}{STOP}" in text)),
        "policy": policy,
    }


def test_by_hand(toolbox):
    node, inputs = _case(toolbox, [TWO, "c" + STOP, ""], [1.0, 0.0, 0.0], continuations=4, max_tokens=200)
    values = node.run(**inputs).values.values.to_lists()
    # Half of the continuations are right wherever they start; the end of a response has its own reward; an empty one
    # has only that.
    assert values == [[0.5, 0.5, 1.0], [0.5, 0.0], [0.0]]
    request = inputs["policy"].calls[0]
    assert len(request.seed) == 3 * 4
    texts = ["".join(map(chr, row)) for row in request.tokens.to_lists()]
    assert texts == ["P"] * 4 + [f"Pa{STOP}"] * 4 + ["P"] * 4
    assert len(request.seed.unique()) == 12
    assert node.context.metrics["continuations"] == 12
    assert node.context.metrics["sampled_tokens"] == 12 * len(f"0\\boxed{{0}}{STOP}")
    assert node.context.metrics["boundaries"] == 6


def test_seeds_do_not_depend_on_what_else_is_in_the_batch():
    uid, place = torch.tensor([5, 9]), Jagged.from_rows([[0, 4], [0, 2, 8]], torch.int64)
    both = continuation_seeds(Stream(0, "value", 1), uid, place, 3)
    alone = continuation_seeds(Stream(0, "value", 1), uid[1:], Jagged.from_rows([[0, 2, 8]], torch.int64), 3)
    assert torch.equal(both[2:], alone)
    assert len(both.unique()) == 15
    assert continuation_seeds(Stream(0), uid[:0], Jagged.from_rows([], torch.int64), 3).shape == (0, 3)


def test_credits_telescope(toolbox):
    node, inputs = _case(
        toolbox, [TWO, "c" + STOP, f"a{STOP}b{STOP}c{STOP}d{STOP}"], [1.0, 0.0, 0.25], continuations=3, max_tokens=200
    )
    values = node.run(**inputs).values
    kept = {k: inputs[k] for k in ("trajectories", "segments", "rewards")}
    credit = toolbox.start(GAE, lam=0.0).run(**kept, values=values).credit
    for i, ends in enumerate(inputs["segments"].ends.to_lists()):
        per_segment = [credit.advantage.row(i)[end - 1].item() for end in ends]
        start = values.values.row(i)[0].item()
        assert sum(per_segment) == pytest.approx(inputs["rewards"].value[i].item() - start)


def test_failed_verdicts_are_left_out(toolbox):
    node, inputs = _case(toolbox, ["c" + STOP], [1.0], continuations=4, max_tokens=200)

    def verify(text):
        if "boxed{0}" in text:
            raise RuntimeError("timeout")
        return float("nan") if len(text) > 100 else 1.0

    values = node.run(**{**inputs, "verifier": toolbox.verifier(verify)}).values.values.to_lists()
    assert values == [[1.0, 1.0]]
    assert node.context.metrics["invalid"] == 2
    none = node.run(**{**inputs, "verifier": toolbox.verifier(lambda text: float("nan"))}).values.values.to_lists()
    assert none == [[0.0, 1.0]]
    assert node.context.metrics["invalid"] == 4


def test_a_state_without_budget_is_verified_as_it_stands(toolbox):
    limits = ThoughtLimits(max_thoughts=1)
    node, inputs = _case(toolbox, [TWO], [0.0], continuations=2, max_tokens=200, thoughts=limits)
    inputs["verifier"] = toolbox.verifier(lambda text: 0.25 if text == "a" + STOP else float("boxed{1}" in text))
    assert node.run(**inputs).values.values.to_lists() == [[0.5, 0.25, 0.0]]


def test_empty_batch_and_bad_settings(toolbox):
    node, inputs = _case(toolbox, [TWO], [1.0])
    none = torch.zeros(0, dtype=torch.int64)
    empty = {k: inputs[k].select(none) for k in ("trajectories", "segments", "rewards")}
    assert len(node.run(**{**inputs, **empty}).values) == 0
    with pytest.raises(ValueError, match="expected continuations ≥ 1, got 0"):
        MonteCarlo.Config(continuations=0)


def test_values_from_gains_by_hand():
    gain = Jagged.from_rows([[0.25, -0.5], [], [1.0]], torch.float32)
    assert values_from_gains(gain, torch.tensor([1.0, 0.5, 0.0])).to_lists() == [[1.25, 1.5, 1.0], [0.5], [-1.0, 0.0]]
