"""The bias of GRPO-λ's update, by enumerating all responses to a problem of path_star: its size, and a bound of it.

With p the chance of success, g_k = ∇log π of the k-th thought and T the number of thoughts, GRPO-λ's expected update at
ratio 1 is U = E[Σ_k W(k, T) (r − p) g_k], and ∇J is the same with W = 1. Let G(k, T) = E[1[T thoughts] (r − p) g_k], so
∇J = Σ G and U = Σ W G. For any c > 0 the triangle inequality gives ‖U/c − ∇J‖ ≤ Σ |W/c − 1| ‖G‖. In style "recent" W
is between 1, at the last thought, and M = (1 − d^n)/(1 − d) for the n moves of the problem; at c = (1 + M)/2

    ‖U/c − ∇J‖ ≤ (M − 1)/(M + 1) · Σ ‖G(k, T)‖,

which is 0 for d = 0, and (n − 1)/(n + 1) times the sum for d → 1. The bound is ours; the scale c is one that Adam takes
out.
"""

import pytest
import torch
from loss_inputs import by_hand, losses

from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.tasks import TASKS
from creditgraph.lab.tasks.exact import markov_values
from creditgraph.pipeline.core.streams import Stream

TASK = TASKS["path_star"]
WRONG = "wrong"  # any thought that loses at once
# Three arms of two edges from 3; the goal is at the end of the first, and two moves may be wasted.
PROBLEM = {"task": "path_star", "start": [3], "goal": [1], "edges": [3, 7, 7, 1, 3, 5, 5, 2, 3, 4, 4, 6], "moves": 4}


class Walks:
    """A policy with a logit per node and thought, and every response it can write: chance, reward, thoughts."""

    def __init__(self, seed=0):
        nodes = sorted({(n,) for n in PROBLEM["edges"]} - {tuple(PROBLEM["goal"])})
        self.places = [(node, thought) for node in nodes for thought in [*TASK.thoughts_from(PROBLEM, node), WRONG]]
        draws = Stream("trace bias", seed).uniform(torch.arange(len(self.places))).double()
        self.table = (2 * draws - 1).requires_grad_()
        self.logs = {node: self._logs(node) for node in nodes}
        self.rows = []
        self._walk(tuple(PROBLEM["start"]), [])

    def _logs(self, node):
        at = [i for i, (place, _) in enumerate(self.places) if place == node]
        return dict(zip([self.places[i][1] for i in at], self.table[at].log_softmax(0), strict=True))

    def _walk(self, node, path):
        after = TASK.thoughts_from(PROBLEM, node)
        for thought, log in self.logs[node].items():
            longer = [*path, log]
            reached = thought in after and TASK.is_goal(PROBLEM, after[thought])
            if thought == WRONG or reached or len(longer) == PROBLEM["moves"]:
                self.rows.append((float(sum(longer).detach().exp()), float(reached), longer))
            else:
                self._walk(after[thought], longer)

    @property
    def success(self):
        return sum(chance * reward for chance, reward, _ in self.rows)

    def parts(self):
        """(k, T) → G(k, T), for k = 1 to T."""
        found = {}
        for chance, reward, logs in self.rows:
            for k, log in enumerate(logs, 1):
                (gradient,) = torch.autograd.grad(log, self.table, retain_graph=True)
                here = found.setdefault((k, len(logs)), torch.zeros_like(self.table))
                here += chance * (reward - self.success) * gradient
        return found

    def update(self, objective):
        """(U, its weights W by (k, T)), from the objective's own gradient of log-probs at ratio 1."""
        weights = {}
        for length in {len(logs) for _, _, logs in self.rows}:
            inputs, loss, _ = losses(by_hand([0.0] * length, [1.0] * length), objective)
            (gradient,) = torch.autograd.grad(loss.values.sum(), inputs.logprobs.values)
            weights |= {(k, length): -float(w) for k, w in enumerate(gradient, 1)}
        return sum(weights[place] * part for place, part in self.parts().items()), weights


def trace(decay, style="recent"):
    return ObjectiveSettings(use="trace", config={"decay": decay, "style": style})


def measured(walks, objective):
    """Cosine of U and ∇J; ‖U/c − ∇J‖ at c = (1 + M)/2, and at the c that makes it least; the bound; by ‖∇J‖."""
    update, weights = walks.update(objective)
    parts = walks.parts().values()
    true, most = sum(parts), max(weights.values())
    size, total = float(true.norm()), sum(float(part.norm()) for part in parts)
    cosine = float(update @ true) / float(update.norm()) / size
    bias = float((2 * update / (1 + most) - true).norm()) / size
    return cosine, bias, (1 - cosine**2) ** 0.5, (most - 1) / (most + 1) * total / size


@pytest.mark.parametrize("seed", range(4))
def test_the_bias_is_within_its_bound_and_grows_with_the_trace(seed):
    walks = Walks(seed)
    assert sum(chance for chance, _, _ in walks.rows) == pytest.approx(1)
    chances = {node: {t: float(log.detach().exp()) for t, log in logs.items()} for node, logs in walks.logs.items()}
    values = markov_values(TASK, PROBLEM, lambda node, left: chances[node])
    assert values[tuple(PROBLEM["start"]), PROBLEM["moves"]] == pytest.approx(walks.success)
    # Without a trace the update is GRPO's, and ∇J exactly.
    assert measured(walks, trace(0.0)) == pytest.approx((1, 0, 0, 0), abs=1e-5)
    before = 0.0
    for decay in (0.5, 0.9, 0.99):
        cosine, bias, least, bound = measured(walks, trace(decay))
        assert before < least <= bias <= bound
        before = least
    # As docs/papers/grpo_lambda.md says.
    assert 0.935 < cosine < 0.947
    assert 0.32 < least < 0.36
    assert 0.42 < bias < 0.45
    assert 1.01 < bound < 1.08
    for decay in (0.0, 0.99):  # weights of style "both" are between 1 and n
        _, bias, least, bound = measured(walks, trace(decay, "both"))
        assert least <= bias <= bound


def test_weights_of_the_trace_by_hand():
    """Two thoughts at d = .5: the first is in both traces, 1 + .5; the last in its own alone."""
    _, weights = Walks().update(trace(0.5))
    assert (weights[1, 2], weights[2, 2], weights[1, 1]) == pytest.approx((1.5, 1, 1))
    assert max(weights.values()) == pytest.approx((1 - 0.5**4) / (1 - 0.5))
