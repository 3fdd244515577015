"""The recorded failures of a run: their steps, where they were reset, and what became of their suffixes."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.rollouts.second_turn import problem_of
from creditgraph.components.rollouts.thoughts import has_oracle, thought_texts, true_first_errors
from creditgraph.pipeline.app.report.rollouts import roles
from creditgraph.pipeline.app.report.source import RunSource
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.payloads import Prompts, Rewards, StepErrors, Trajectories


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed response that was reset.

    Attributes:
        uid: of its trajectory.
        iteration: from 0.
        problem: the question, without instructions.
        answer: reference answer, "" when there is none.
        solution: reference solution, "" when there is none.
        steps: its thoughts as text, at least one.
        step: the localised step, from 1: suffixes continue the steps before it.
        source: how the step was determined ("boxed", "uniform", …).
        oracle: the true first error, from 1, on the embedded task; None on others.
        suffixes: number of its suffixes whose outcome could be verified.
        correct: number of those that end correct.
    """

    uid: int
    iteration: int
    problem: str
    answer: str
    solution: str
    steps: list[str]
    step: int
    source: str
    oracle: int | None
    suffixes: int
    correct: int


def read_failures(run: RunSource) -> list[Failure]:
    """All recorded failures with a localised step, in the order of iterations; [] when no node localises.

    What is missing or damaged is left out, with a note of the run.

    Raises:
        RunError: several nodes localise.
    """
    kinds = roles(run)
    localised = _passed_on(run, kinds["StepErrors"])
    if not localised:
        return []
    if len(localised) > 1:
        raise RunError(
            f"{run.path}: {', '.join(localised)} are all localised steps, expected those of one node. Train the graph "
            "with one localizer."
        )
    tokenizer = load_tokenizer(ModelSpec(**(run.config.get("model") or {})))
    failures: list[Failure] = []
    for iteration in run.iterations(localised[0]):
        errors = run.read(localised[0], iteration)
        if isinstance(errors, StepErrors) and len(errors):
            failures += _of_iteration(run, kinds, iteration, errors, tokenizer)
    return failures


def _passed_on(run: RunSource, outputs: list[str]) -> list[str]:
    """Those of the outputs that no node of another one reads: the expander returns the steps that it has reset to."""
    wires = {name: str(node.get("in", {})) for name, node in (run.config.get("nodes") or {}).items()}
    readers = {name.partition(".")[0] for name in outputs}
    return [out for out in outputs if not any(out in wires.get(node, "") for node in readers)]


def _of_iteration(
    run: RunSource, kinds: dict[str, list[str]], iteration: int, errors: StepErrors, tokenizer: Any
) -> list[Failure]:
    batches = _batches(run, kinds["Trajectories"], iteration, Trajectories)
    failed = _with_rows(batches, errors.uid)
    prompts = (
        None if failed is None else _with_rows(_batches(run, kinds["Prompts"], iteration, Prompts), failed.prompt_uid)
    )
    if failed is None or prompts is None:
        missing = "failures" if failed is None else "prompts"
        run.note(f"the {missing} of iteration {iteration} are not recorded, so its resets are left out")
        return []
    failed = failed.select(failed.index_of(errors.uid))
    uids = set(errors.uid.tolist())
    outcomes = _outcomes(batches, _batches(run, kinds["Rewards"], iteration, Rewards), uids)
    truth: list[int | None] = [None] * len(failed)
    if has_oracle(prompts):
        truth = list(true_first_errors(prompts, failed, tokenizer).tolist())
    rows = prompts.index_of(failed.prompt_uid).tolist()
    return [
        Failure(
            uid=uid,
            iteration=iteration,
            problem=problem_of(prompts, row)[1],
            answer=prompts.answer[row],
            solution=prompts.solution[row],
            steps=steps,
            step=step,
            source=source,
            oracle=first,
            suffixes=len(outcomes[uid]),
            correct=sum(outcomes[uid]),
        )
        for uid, row, steps, step, source, first in zip(
            failed.uid.tolist(),
            rows,
            thought_texts(failed, tokenizer),
            errors.step.tolist(),
            errors.source,
            truth,
            strict=True,
        )
    ]


def _outcomes(batches: list[Trajectories], rewards: list[Rewards], failures: set[int]) -> dict[int, list[bool]]:
    """Failure → whether each of its suffixes ends correct; those that could not be verified are left out."""
    correct = {
        uid: right
        for batch in rewards
        for uid, right, valid in zip(batch.uid.tolist(), batch.correct.tolist(), batch.valid.tolist(), strict=True)
        if valid
    }
    # Merged outputs hold the same suffixes again.
    parents = {
        uid: parent
        for batch in batches
        for uid, parent in zip(batch.uid.tolist(), batch.parent.tolist(), strict=True)
        if parent in failures
    }
    outcomes: dict[int, list[bool]] = defaultdict(list)
    for uid, parent in parents.items():
        if uid in correct:
            outcomes[parent].append(correct[uid])
    return outcomes


def _with_rows(batches: list[Any], uid: Tensor) -> Any:
    """The first batch that has all of these rows; None when there is none."""
    return next((batch for batch in batches if set(uid.tolist()) <= set(batch.uid.tolist())), None)


def _batches(run: RunSource, names: list[str], iteration: int, kind: type[Any]) -> list[Any]:
    payloads = (run.read(name, iteration) for name in names)
    return [payload for payload in payloads if isinstance(payload, kind)]
