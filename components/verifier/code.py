"""Programs, verified by their tests in a sandbox."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from creditgraph.components.sandbox.isolation import no_isolation
from creditgraph.components.sandbox.limits import Limits, at_once
from creditgraph.components.sandbox.pool import NO_START, Program, TestResult, run_programs
from creditgraph.components.sandbox.probe import find_isolation
from creditgraph.components.text.code_tests import CodeTests, extract_code, mismatch, read_tests
from creditgraph.components.verifier.base import RIGHT, Item, Verdict, VerifierComponent, undecided, wrong
from creditgraph.pipeline.core.component import Context

# Characters. Solutions of coding problems are far shorter; longer sources are endless repetitions.
MAX_SOURCE = 200_000


class Code(VerifierComponent):
    """Verifies programs by tests in a sandbox: text on standard input, or calls of a function.

    A prompt's tests are in its metadata under "tests". The last Python block of a response runs in bubblewrap, with
    limits of time, memory and processes; expected outputs never enter the sandbox. A host that cannot isolate programs
    is refused. A program that hangs, exceeds its limits or ends its sandbox is wrong with that reason; other programs
    are not affected.
    """

    paper = "2403.07974"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Tests, reward and sandbox."""

        reward: Literal["fraction", "all"] = "fraction"
        """fraction: share of tests passed; all: 1 when every test passes, otherwise 0. Correct always means all"""
        tests: Literal["all", "public", "private"] = "all"
        """which tests of a prompt are run"""
        tolerance: float = 1e-6
        """relative above 1, absolute below: how far a number may be off where the expected one has a decimal point;
        whole numbers are compared exactly, and equal text always passes"""
        limits: Limits = field(default_factory=Limits)
        """per program"""
        workers: int = 0
        """programs at a time; 0 means one per core, at most 8"""
        interpreter: str = ""
        """Python that runs the programs; empty: this one, without the packages of its environment"""
        packages: tuple[str, ...] = ()
        """folders with packages that programs may import (such as a site-packages with numpy), mounted read-only"""
        allow_unsandboxed: bool = False
        """run programs without isolation if the host cannot isolate them; they can then do whatever you can"""

        def __post_init__(self) -> None:
            if not 0 <= self.workers <= 64:
                raise ValueError(f"expected 0 ≤ workers ≤ 64, got {self.workers}.")
            if not 0 <= self.tolerance < 1:
                raise ValueError(f"expected 0 ≤ tolerance < 1, got {self.tolerance}.")

    references = frozenset({"code"})
    config: Config

    def setup(self, context: Context) -> None:
        """Finds a way to isolate programs, so that a host without one is refused before anything is sampled."""
        super().setup(context)
        config = self.config
        isolate = no_isolation if config.allow_unsandboxed else find_isolation
        self._isolation = isolate(config.interpreter, config.packages)
        self._workers = at_once(config.workers)

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item; the programs of a batch run several at a time."""
        prepared = [self._prepare(item) for item in items]
        programs = [p[0] for p in prepared if not isinstance(p, Verdict)]
        results = iter(run_programs(programs, self._isolation, self.config.limits, self._workers))
        return [p if isinstance(p, Verdict) else self._verdict(p[1], next(results)) for p in prepared]

    def _prepare(self, item: Item) -> Verdict | tuple[Program, CodeTests]:
        try:
            tests = read_tests(item.metadata, self.config.tests)
        except ValueError as error:
            return undecided(str(error))
        source = extract_code(item.text)
        if source is None:
            return wrong("no code block in the response")
        if len(source) > MAX_SOURCE:
            return wrong(f"a program of {len(source)} characters; at most {MAX_SOURCE} are run")
        return Program(source=source, inputs=[test.input for test in tests.tests], function=tests.function), tests

    def _verdict(self, tests: CodeTests, results: Sequence[TestResult]) -> Verdict:
        failures = [
            result.reason or mismatch(test, tests.function, result.out, result.result, self.config.tolerance)
            for test, result in zip(tests.tests, results, strict=True)
        ]
        passed = failures.count("")
        if passed == len(failures):
            return RIGHT
        if all(result.reason.startswith(NO_START) for result in results):
            return undecided(results[0].reason)
        first = next(i for i, failure in enumerate(failures) if failure)
        detail = f"{passed} of {len(failures)} tests passed; test {first + 1}: {failures[first]}"
        value = passed / len(failures) if self.config.reward == "fraction" else 0.0
        return Verdict(value=value, correct=False, detail=detail)
