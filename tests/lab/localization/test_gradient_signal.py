"""|A|/T·(1−π): numbers by hand, and against the gradient itself."""

import math

import numpy as np
import pytest
import torch
from failures_by_hand import Reset

from creditgraph.lab.localization.gradient_signal import Signal, gradient_signal
from creditgraph.pipeline.app.report.source import read_run

HALF = math.log(0.5)


def test_one_response_by_hand():
    signal = Signal()
    # Four tokens, the first inherited: T = 3. |A| = 1.5; 1 − π = .5, .5, 0: 1.5/3·(.5 + .5 + 0) = .5.
    signal.add([9.0, -1.5, -1.5, -1.5], [False, True, True, True], [HALF, HALF, HALF, 0.0])
    numbers = signal.numbers()
    assert (numbers["responses"], numbers["silent"], numbers["tokens"]) == (1, 0, 3)
    assert numbers["mean"] == pytest.approx(0.5 / 3)
    # Places 1/4, 2/4 and 3/4 of the response; probabilities .5, .5 and 1.
    assert np.nonzero(numbers["by_position"]["tokens"])[0].tolist() == [2, 5, 7]
    assert [numbers["by_position"]["mean"][i] for i in (2, 5, 7)] == pytest.approx([0.25, 0.25, 0.0])
    assert numbers["by_probability"]["tokens"][5] == 2
    assert numbers["by_probability"]["tokens"][9] == 1
    assert numbers["by_probability"]["mean"][5] == pytest.approx(0.25)
    assert math.isnan(numbers["by_probability"]["mean"][0])


def test_silent_responses_count_and_unknown_logprobs_do_not():
    signal = Signal()
    signal.add([0.0, 0.0], [True, True], [HALF, HALF])
    signal.add([1.0, 1.0], [True, True], [HALF, math.nan])  # T stays 2
    signal.add([1.0], [False], [HALF])
    assert (signal.responses, signal.silent) == (2, 1)
    assert signal.tokens[0].sum() == 3
    assert signal.sums[1].sum() == pytest.approx(0.25)


def test_it_is_the_gradient_of_the_loss_by_the_sampled_tokens_logit():
    torch.manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 3, 6, 2, 2])
    advantage = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    logprobs = torch.log_softmax(logits, -1)[torch.arange(5), tokens]
    (-(advantage * logprobs).sum() / 5).backward()
    signal = Signal()
    signal.add(advantage, [True] * 5, logprobs.detach())
    assert signal.sums[0].sum() == pytest.approx(float(logits.grad[torch.arange(5), tokens].abs().sum()))


def test_suffixes_of_failures_apart(make_run):
    run = read_run(make_run([Reset(3, 2, (True, False))]))
    signals = gradient_signal(run, [100])
    assert {name: (s.responses, s.silent) for name, s in signals.items()} == {"base": (1, 1), "suffix": (2, 0)}
    length = int(signals["base"].tokens[0].sum())
    # A = 2 on all tokens, and the same log-prob −.5 everywhere.
    assert signals["suffix"].mean == pytest.approx(2 / length * (1 - math.exp(-0.5)))
    assert set(gradient_signal(run, [])) == {"base"}
