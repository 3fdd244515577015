import torch

from components.learner.objective import Objective
from components.learner.optimizer import OptimizerSettings


def test_run_trains(make_learner, make_batch):
    learner = make_learner(objective=Objective(kind="reinforce"), optimizer=OptimizerSettings(lr=1e-2))
    before = learner.initial()["weights"]
    out = learner.run(**dict(zip(("trajectories", "credit"), make_batch(), strict=True)))
    assert before.version == 0
    assert out.weights.version == 1
    assert out.report.metrics["steps"] == 1
    assert any(not torch.equal(before.tensors[n], t) for n, t in out.weights.tensors.items())
    print(out.report)
