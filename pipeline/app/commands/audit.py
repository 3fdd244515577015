"""`creditgraph audit`: is this credit right? Checks of any function from rewards to advantages, or to a loss."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from creditgraph.pipeline.app.arguments import add_settings, add_trust
from creditgraph.pipeline.core.errors import ConfigError

if TYPE_CHECKING:
    from creditgraph.pipeline.app.audit.checks import Finding

SUMMARY = "Check credit of any trainer: an advantage or loss function, a component, a recipe, or recorded data."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = (
        "examples:\n"
        "  creditgraph audit my_trainer.core:compute_advantage\n"
        "  creditgraph audit loss.py:policy_loss --bind logp=logprobs -s clip=0.2\n"
        "  creditgraph audit advantage.group -s normalize=mean\n"
        "  creditgraph audit recipe=toy_grpo\n"
        "  creditgraph audit rollouts.parquet --columns reward=score group=prompt_id\n"
        "exit code: 1 if a check fails that is not declared"
    )
    parser.add_argument("target", metavar="TARGET", help="function, component, recipe=NAME, run folder or Parquet file")
    parser.add_argument(
        "--bind", nargs="+", action="extend", default=[], metavar="parameter=column", help="what a parameter is given"
    )
    add_settings(parser, "a setting")
    parser.add_argument(
        "--kind", choices=("advantage", "loss"), help="of a function; read from its parameters otherwise"
    )
    parser.add_argument(
        "--columns", nargs="+", action="extend", default=[], metavar="name=column", help="columns of a Parquet file"
    )
    parser.add_argument(
        "--accumulate",
        choices=("sum", "mean", "rows", "tokens"),
        help="how the trainer weights micro-batches of a loss",
    )
    parser.add_argument("--known", metavar="FILE", help="YAML of known failures, target: {check: reason}")
    parser.add_argument(
        "--declare", default="", metavar="NAMES", help="checks or designs whose failure is wanted, with commas"
    )
    parser.add_argument(
        "--layer",
        nargs="+",
        default=[],
        choices=("metamorphic", "gradient", "loss", "records"),
        help="these checks only",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--html", metavar="FILE", help="also write a page with the counter-examples")
    parser.add_argument("--time", action="store_true", help="also print the seconds of each check")


def main(options: argparse.Namespace) -> int:
    """Prints the results; 1 when a check fails that nobody declared."""
    import torch

    from creditgraph.pipeline.app.audit.audit import as_json, failures, known_names, run_checks, table, write_page
    from creditgraph.pipeline.app.audit.known import mended, of_target, read_known

    declared = known_names([name for name in options.declare.split(",") if name])
    listed = read_known(Path(options.known)) if options.known else {}
    results = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # arrays of a dozen numbers: threads only wait for each other
    try:
        with _no_way_out(options.target):
            for target, checks in _targets(options):
                known = of_target(listed, target.name)
                results += run_checks(target, checks, declared, frozenset(options.layer), known)
    finally:
        torch.set_num_threads(threads)
    print(as_json(results) if options.json else table(results))
    for line in mended(listed, results):
        print(line, file=sys.stderr)
    if options.time:
        print("\n".join(f"{r.seconds:7.2f} s  {r.target}  {r.check.name}" for r in results))
    if options.html:
        write_page(Path(options.html), results, options.target)
    return 1 if failures(results) else 0


@contextmanager
def _no_way_out(target: str) -> Iterator[None]:
    """A function that ends the process has passed nothing: an AuditError instead, so that CI does not see success."""
    from creditgraph.pipeline.app.audit.targets import AuditError

    def leave(status: int) -> NoReturn:
        raise AuditError(f"{target}: it ends the process (exit code {status}); expected a result. Remove the exit.")

    kept, os._exit = os._exit, leave
    try:
        yield
    except SystemExit as error:
        raise AuditError(f"{target}: it ends the process (exit code {error.code}); remove the exit.") from error
    finally:
        os._exit = kept


def _targets(options: argparse.Namespace) -> list[tuple[Any, Sequence[Any]]]:
    """What is audited, each with the checks of its kind."""
    from creditgraph.components.learner.objective import Objective
    from creditgraph.pipeline.app.audit.installed import installed
    from creditgraph.pipeline.app.audit.opened import function_target
    from creditgraph.pipeline.app.audit.records import read_records
    from creditgraph.pipeline.app.audit.records_tokens import RECORDS
    from creditgraph.pipeline.app.audit.targets import load_function
    from creditgraph.pipeline.core.component import Component
    from creditgraph.pipeline.run.compose.overrides import parse_settings

    target = options.target
    path = Path(target)
    if target.startswith("recipe="):
        return _of_recipe(target, options.set)
    if path.is_dir() or target.endswith((".parquet", ".jsonl")):
        return [(records, RECORDS) for records in read_records(path, _pairs(options.columns, "--columns"))]
    settings = parse_settings(options.set)
    if ":" not in target:
        return _of_component(target, settings)
    found = installed(target, options.kind) or load_function(target)
    if isinstance(found, type) and issubclass(found, Component | Objective):
        return _of_component(target, settings)
    given = _pairs(options.bind, "--bind")
    return [function_target(found, target, given, settings, kind=options.kind, accumulate=options.accumulate)]


def _of_component(name: str, settings: dict[str, Any]) -> list[tuple[Any, Sequence[Any]]]:
    from creditgraph.components.learner.objective import Objective, ObjectiveSettings
    from creditgraph.components.learner.objective.settings import OBJECTIVES
    from creditgraph.pipeline.app.audit.audit import of_advantages
    from creditgraph.pipeline.app.audit.loss import LOSS
    from creditgraph.pipeline.app.audit.ours import component_target, objective_target
    from creditgraph.pipeline.core.registry import load_class

    cls = None if name in OBJECTIVES else load_class(name)
    if cls is None or issubclass(cls, Objective):
        return [(objective_target(ObjectiveSettings(use=name, config=settings), name), LOSS)]
    return [(component_target(cls, name, settings), of_advantages())]


def _of_recipe(recipe: str, more: list[str]) -> list[tuple[Any, Sequence[Any]]]:
    """The nodes of a recipe that give credit, and the losses of its learners."""
    from creditgraph.pipeline.app.audit.audit import of_advantages
    from creditgraph.pipeline.app.audit.contract import CONTRACT
    from creditgraph.pipeline.app.audit.loss import LOSS
    from creditgraph.pipeline.app.audit.ours import component_target, objective_target, unmade
    from creditgraph.pipeline.app.audit.targets import AuditError
    from creditgraph.pipeline.core.payloads import Credit
    from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

    graph = build_experiment(compose([recipe, *more]), "audit").graph
    found: list[tuple[Any, Sequence[Any]]] = []
    for node in graph.nodes:
        if any(socket.carries(Credit) for socket in node.sockets.outputs.values()):
            settings = vars(node.config)
            try:
                found.append((component_target(node.cls, node.name, settings), of_advantages()))
            except AuditError as error:
                found.append((unmade(node.name), (dataclasses.replace(CONTRACT[0], run=_skip(str(error))),)))
        objective = getattr(node.config, "objective", None)
        if objective is not None:
            found.append((objective_target(objective, f"{node.name}.objective"), LOSS))
    return found


def _skip(reason: str) -> Callable[[Any], Finding]:
    from creditgraph.pipeline.app.audit.checks import skipped

    return lambda _: skipped(reason)


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    parts = [part for text in texts for part in text.split(",") if part]
    for part in parts:
        if "=" not in part:
            raise ConfigError(f"{option} {part}: expected name=column.")
    return dict(part.split("=", 1) for part in parts)
