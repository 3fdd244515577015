"""Published faults are found, each by the check that says what is wrong, and their repaired forms pass."""

import advantage_bugs
import loss_bugs
import pytest

from creditgraph.pipeline.app.audit.audit import failures, run_checks
from creditgraph.pipeline.app.audit.contract import CONTRACT
from creditgraph.pipeline.app.audit.gradient import GRADIENT
from creditgraph.pipeline.app.audit.loss import LOSS
from creditgraph.pipeline.app.audit.loss_target import loss_function
from creditgraph.pipeline.app.audit.metamorphic import METAMORPHIC
from creditgraph.pipeline.app.audit.targets import advantage_function

CASES = {
    **{k: ("advantage", *v) for k, v in advantage_bugs.BUGS.items()},
    **{k: ("loss", *v) for k, v in loss_bugs.BUGS.items()},
}


def undeclared(kind, function, name=None):
    if kind == "loss":
        target, checks = loss_function(function, function.__name__, {}, {}), LOSS
    else:
        target, checks = advantage_function(function, function.__name__, {}, {}), (*CONTRACT, *METAMORPHIC, *GRADIENT)
    return failures(run_checks(target, [c for c in checks if name in (None, c.name)]))


@pytest.mark.parametrize("reference", CASES)
def test_found(reference):
    kind, check, wrong, _ = CASES[reference]
    assert check in {result.check.name for result in undeclared(kind, wrong, check)}


@pytest.mark.parametrize("reference", CASES)
def test_no_false_alarm(reference):
    kind, _, _, repaired = CASES[reference]
    assert [(r.check.name, r.finding.message) for r in undeclared(kind, repaired)] == []


def test_at_least_twelve():
    assert len(CASES) >= 12
