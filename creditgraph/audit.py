"""`creditgraph audit` in a test: `from creditgraph.audit import check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.audit.audit import Result, failures, known_names, run_checks, table
from creditgraph.pipeline.app.audit.known import mended, of_target, read_known
from creditgraph.pipeline.app.audit.opened import function_target, named_target


def check(
    function: Callable[..., Any] | str,
    *,
    bind: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    kind: str | None = None,
    accumulate: str | None = None,
    declare: Sequence[str] = (),
    known: str | Path | None = None,
) -> list[Result]:
    """Audits an advantage function or a loss, as `creditgraph audit` does.

        def test_credit():
            check(compute_advantage, declare=["batch_deviation"])

    Args:
        function: a function, "package.module:name", "file.py:name", or a short name such as "trl:grpo".
        bind: parameter → column, for parameters of other names.
        settings: parameter → value.
        kind: "advantage" or "loss"; read from the parameters by default.
        accumulate: how the trainer weights micro-batches of a loss: "sum", "mean", "rows" or "tokens".
        declare: names of checks, or of designs, whose failure is wanted.
        known: a YAML file of known failures, target → {check: reason}.

    Returns:
        The result of each check.

    Raises:
        AssertionError: a check fails that is neither declared nor known; with the table and the counter-examples.
        AuditError: the function cannot be audited.
    """
    options = {"kind": kind, "accumulate": accumulate}
    if isinstance(function, str):
        target, checks = named_target(function, bind or {}, settings or {}, **options)
    else:
        name = f"{function.__module__}:{function.__qualname__}"
        target, checks = function_target(function, name, bind or {}, settings or {}, **options)
    listed = read_known(Path(known)) if known else {}
    results = run_checks(target, checks, known_names(declare), known=of_target(listed, target.name))
    if failures(results):
        raise AssertionError("\n" + "\n".join([table(results), *mended(listed, results)]))
    return results
