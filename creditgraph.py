"""creditgraph: the public names for plug-ins, and `python -m creditgraph`.

    from creditgraph import Component, Credit, Trajectories, same_rows

A name is imported on first use, so `creditgraph --help` does not wait for torch.

The package's own folders are called `pipeline` and `components`, names that a user's folder may have too. Importing
this module imports them from the folder of this file, whatever else is on `sys.path`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.learner.objective import LossInputs as LossInputs
    from components.learner.objective import Meters as Meters
    from components.learner.objective import Objective as Objective
    from components.verifier.base import Item as Item
    from components.verifier.base import Verdict as Verdict
    from components.verifier.base import VerifierComponent as VerifierComponent
    from pipeline.core.component import Component as Component
    from pipeline.core.component import Context as Context
    from pipeline.core.component import Count as Count
    from pipeline.core.component import same_rows as same_rows
    from pipeline.core.errors import ConfigError as ConfigError
    from pipeline.core.errors import CreditgraphError as CreditgraphError
    from pipeline.core.errors import DataError as DataError
    from pipeline.core.handles import Completions as Completions
    from pipeline.core.handles import Environments as Environments
    from pipeline.core.handles import Policy as Policy
    from pipeline.core.handles import Requests as Requests
    from pipeline.core.handles import Sampling as Sampling
    from pipeline.core.handles import Step as Step
    from pipeline.core.handles import Verifier as Verifier
    from pipeline.core.jagged import Jagged as Jagged
    from pipeline.core.metric import Metric as Metric
    from pipeline.core.payloads import Batch as Batch
    from pipeline.core.payloads import Credit as Credit
    from pipeline.core.payloads import Payload as Payload
    from pipeline.core.payloads import Prompts as Prompts
    from pipeline.core.payloads import Rewards as Rewards
    from pipeline.core.payloads import Segments as Segments
    from pipeline.core.payloads import SegmentValues as SegmentValues
    from pipeline.core.payloads import StepErrors as StepErrors
    from pipeline.core.payloads import TokenLogprobs as TokenLogprobs
    from pipeline.core.payloads import TrainReport as TrainReport
    from pipeline.core.payloads import Trajectories as Trajectories
    from pipeline.core.payloads import Turns as Turns
    from pipeline.core.payloads import Weights as Weights
    from pipeline.core.payloads import check_aligned as check_aligned

ROOT = Path(__file__).resolve().parent

# Module → the names above that it gives out.
_NAMES = {
    "components.learner.objective": ("LossInputs", "Meters", "Objective"),
    "components.verifier.base": ("Item", "Verdict", "VerifierComponent"),
    "pipeline.core.component": ("Component", "Context", "Count", "same_rows"),
    "pipeline.core.errors": ("ConfigError", "CreditgraphError", "DataError"),
    "pipeline.core.handles": ("Completions", "Environments", "Policy", "Requests", "Sampling", "Step", "Verifier"),
    "pipeline.core.jagged": ("Jagged",),
    "pipeline.core.metric": ("Metric",),
    "pipeline.core.payloads": (
        "Batch",
        "Credit",
        "Payload",
        "Prompts",
        "Rewards",
        "Segments",
        "SegmentValues",
        "StepErrors",
        "TokenLogprobs",
        "TrainReport",
        "Trajectories",
        "Turns",
        "Weights",
        "check_aligned",
    ),
}


def _import_own(name: str) -> None:
    """Imports one of the package's top-level folders from ROOT, once; its submodules are then found through it.

    Raises:
        ImportError: another module of that name was imported before, or another distribution has overwritten ours.
    """
    # The entry is taken back: for an installed package ROOT is site-packages, which must not come before the standard
    # library.
    sys.path.insert(0, str(ROOT))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT))
    file = Path(module.__file__ or "")
    if file == ROOT / name / "__init__.py" and getattr(module, "DISTRIBUTION", "") == "creditgraph":
        return
    from importlib.metadata import packages_distributions

    others = sorted(set(packages_distributions().get(name, [])) - {"creditgraph"})
    source = f"installed by {', '.join(others)}" if others else "not part of creditgraph"
    raise ImportError(
        f"creditgraph: '{name}' is {file}, {source}; expected {ROOT / name / '__init__.py'} of creditgraph. Import "
        "creditgraph before "
        f"your own '{name}', or install creditgraph in an environment without the other one."
    )


_import_own("pipeline")
_import_own("components")


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'creditgraph' has no attribute '{name}'")


def main(arguments: Sequence[str] | None = None) -> int:
    """The `creditgraph` command; returns its exit code."""
    from pipeline.app.cli import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
