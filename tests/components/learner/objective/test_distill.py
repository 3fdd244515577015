"""Objective "distill": its gradient is that of the exact reverse KL."""

import pytest
import torch
from loss_inputs import by_hand, losses

from creditgraph.components.learner.objective import LossInputs, ObjectiveSettings
from creditgraph.components.learner.objective.base import CANDIDATE, CANDIDATE_LOGPROB
from creditgraph.components.learner.objective.distill import TEACHER_LOGPROB, top_divergence
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.settings import SettingsError

DISTILL = ObjectiveSettings(use="distill")
VOCABULARY = 5


def distributions(seed=0, places=3):
    """Logits of a student, with gradient, and log-probs of a teacher, [places, V]."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(places, VOCABULARY, generator=g, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(places, VOCABULARY, generator=g, dtype=torch.float64).log_softmax(-1)


def exact_gradient(logits, teacher):
    student = logits.log_softmax(-1)
    divergence = (student.exp() * (student - teacher)).sum()
    return torch.autograd.grad(divergence, logits)[0]


def inputs(logprobs, advantage, columns):
    row = Jagged.from_rows([advantage])
    return LossInputs(
        logprobs=row.with_values(logprobs),
        old_logprobs=row.with_values(logprobs.detach()),
        engine_logprobs=row.with_values(logprobs.detach()),
        advantage=row,
        mask=row.with_values(torch.ones(len(advantage), dtype=torch.bool)),
        group=torch.zeros(1, dtype=torch.int64),
        old_entropies=row,
        columns={name: row.with_values(values) for name, values in columns.items()},
    )


def test_by_hand():
    # π = (1/2, 1/4 | 1/4 outside), q = (1/4, 1/4 | 1/2): ½ log 2 + 0 + ¼ log ½ = ¼ log 2.
    student, teacher = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    assert top_divergence(student, teacher).tolist() == pytest.approx([0.25 * torch.tensor(2.0).log().item()])


def test_candidates_of_the_whole_vocabulary_give_the_exact_gradient():
    logits, teacher = distributions()
    student = logits.log_softmax(-1)
    columns = {}
    for v in range(VOCABULARY):
        columns[f"{CANDIDATE}{v}"] = torch.full((3,), v, dtype=torch.int32)
        columns[f"{CANDIDATE_LOGPROB}{v}"] = student[:, v]
        columns[f"{TEACHER_LOGPROB}{v}"] = teacher[:, v]
    _, loss, metrics = losses_of(inputs(student[:, 0], torch.ones(3, dtype=torch.float64), columns))
    divergence = (student.exp() * (student - teacher)).sum(1)
    torch.testing.assert_close(loss.values, divergence)
    (gradient,) = torch.autograd.grad(loss.values.sum(), logits)
    torch.testing.assert_close(gradient, exact_gradient(logits, teacher))
    assert metrics["teacher_kl"] == pytest.approx(float(divergence.detach().mean()))


def test_fewer_candidates_give_less():
    logits, teacher = distributions()
    student = logits.log_softmax(-1).detach()
    whole = (student.exp() * (student - teacher)).sum(1)
    best = teacher.topk(2).indices
    part = top_divergence(student.gather(1, best), teacher.gather(1, best))
    assert (part >= -1e-9).all()
    assert (part <= whole + 1e-9).all()


def test_sampled_tokens_give_the_exact_gradient_in_expectation():
    logits, teacher = distributions()
    total = torch.zeros_like(logits)
    for token in range(VOCABULARY):
        student = logits.log_softmax(-1)[:, token]
        advantage = (teacher[:, token] - student).detach()
        _, loss, _ = losses_of(inputs(student, advantage, {}))
        probability = student.detach().exp()
        total += torch.autograd.grad((probability * loss.values).sum(), logits)[0]
    torch.testing.assert_close(total, exact_gradient(logits, teacher))


def test_later_steps_measure_the_gap_from_the_present_policy():
    # Ratio 2, A = 1: ρ (A − log ρ) = 2 (1 − log 2). Ratio e²  is bounded to 3, and the gap 1 − 2 is negative.
    log2 = torch.tensor(2.0).log().item()
    part = by_hand([log2, 2.0], [1.0, 1.0])
    _, loss, metrics = losses(part, DISTILL)
    (gradient,) = torch.autograd.grad(loss.values.sum(), part.logprobs.values)
    assert gradient.tolist() == pytest.approx([-2 * (1 - log2), 3.0])
    assert metrics["teacher_kl"] == pytest.approx(-(1 - log2 + 1 - 2) / 2)


def test_a_lower_bound_and_weighed_candidates():
    # SDPO's bound: of the ratios e and 1/2 the first becomes 2. Candidates have one divergence, ¼ log 2, at each token.
    log2 = torch.tensor(2.0).log().item()
    part = by_hand([1.0, -log2], [1.0, 1.0])
    bounded = ObjectiveSettings(use="distill", config={"max_ratio": 2.0})
    _, loss, _ = losses(part, bounded)
    (gradient,) = torch.autograd.grad(loss.values.sum(), part.logprobs.values)
    assert gradient.tolist() == pytest.approx([-2 * (1 - 1), -0.5 * (1 + log2)])
    student, teacher = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.25]).log()
    columns = {f"{CANDIDATE_LOGPROB}{v}": student[v].repeat(2) for v in range(2)}
    columns |= {f"{TEACHER_LOGPROB}{v}": teacher[v].repeat(2) for v in range(2)}
    part = part.with_columns(**{name: part.mask.with_values(values) for name, values in columns.items()})
    assert losses(part, bounded)[1].values.tolist() == pytest.approx([0.25 * log2] * 2)
    weighed = ObjectiveSettings(use="distill", config={"max_ratio": 2.0, "weigh_candidates": True})
    assert losses(part, weighed)[1].values.tolist() == pytest.approx([0.5 * log2, 0.125 * log2])
    with pytest.raises(SettingsError, match=r"expected max_ratio ≥ 1, got 0\.5"):
        ObjectiveSettings(use="distill", config={"max_ratio": 0.5})


def test_off_policy_the_expectation_is_exact_below_the_bound():
    # Tokens of π_old, Σ_y π_old(y) ρ(y) (A(y) − log ρ(y)) ∇log π(y), against autograd of the exact divergence of π.
    logits, teacher = distributions()
    old = (logits + torch.linspace(-0.4, 0.4, VOCABULARY)).log_softmax(-1).detach()
    total = torch.zeros_like(logits)
    for token in range(VOCABULARY):
        student = logits.log_softmax(-1)[:, token]
        part = inputs(student, teacher[:, token] - old[:, token], {})
        part = part.replace(old_logprobs=part.logprobs.with_values(old[:, token]))
        _, loss, _ = losses_of(part)
        total += torch.autograd.grad((old[:, token].exp() * loss.values).sum(), logits)[0]
    torch.testing.assert_close(total, exact_gradient(logits, teacher))


def losses_of(part):
    return losses(part, DISTILL)
