"""Steps of a learner, and comparisons of weights."""

import torch

from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.components.learner.optimizer import OptimizerSettings

FAST = OptimizerSettings(lr=1e-2)
REINFORCE = ObjectiveSettings(use="reinforce", aggregate="seq_mean_token_mean")


def run(learner, batch):
    return learner.run(trajectories=batch[0], credit=batch[1])


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def distance(a, b):
    return max(float((a[n] - b[n]).abs().max()) for n in a)
