"""Programs, judged by their tests in a sandbox."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from components.sandbox.isolation import Isolation, plain
from components.sandbox.limits import Limits
from components.sandbox.pool import Program, Test, TestResult, run_programs
from components.sandbox.probe import find_isolation
from components.verifier.base import Item, MemoVerifier, Verdict, unjudged, wrong
from components.verifier.code_tests import CodeTest, CodeTests, extract_code, read_tests, same_output, same_value
from pipeline.core.component import Component, Context
from pipeline.core.payloads import Verifier

MAX_SOURCE = 200_000


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The verifier."""

    verifier: Verifier


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """What is run, and how it counts."""

    reward: Literal["fraction", "all"] = "fraction"
    """fraction: share of tests passed; all: 1 when every test passes, otherwise 0. Correct always means all"""
    tests: Literal["all", "public", "private"] = "all"
    """which tests of a prompt are run"""
    max_tests: int = 0
    """tests per problem, taken from the front; 0 takes all"""
    tolerance: float = 1e-6
    """relative above 1, absolute below: how far a decimal number may be off; equal text always passes"""
    limits: Limits = field(default_factory=Limits)
    """per program"""
    workers: int = 0
    """programs at a time; 0 takes one per core, at most 8"""
    interpreter: str = ""
    """Python that runs the programs; empty: this one, without the packages of its environment"""
    packages: tuple[str, ...] = ()
    """folders with packages that programs may import (such as a site-packages with numpy), mounted read-only"""
    allow_unsandboxed: bool = False
    """run programs without any isolation where the host cannot isolate; they can then do whatever you can"""

    def __post_init__(self) -> None:
        if self.max_tests < 0 or not 0 <= self.workers <= 64:
            raise ValueError("max_tests must be 0 or more, workers 0 to 64.")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance: found {self.tolerance}; wanted 0 to 1.")


class CodeVerifier(MemoVerifier):
    """Runs the last Python block of a response on the prompt's tests. Expected outputs never enter the sandbox."""

    def __init__(self, settings: CodeSettings, way: Isolation) -> None:
        super().__init__()
        self._settings, self._way = settings, way
        self.workers = settings.workers or min(len(os.sched_getaffinity(0)), 8)

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item."""
        prepared = [self._prepare(item) for item in items]
        runs = [(i, found) for i, found in enumerate(prepared) if not isinstance(found, Verdict)]
        results = run_programs([found[0] for _, found in runs], self._way, self._settings.limits, self.workers)
        out: list[Verdict] = [found if isinstance(found, Verdict) else wrong("") for found in prepared]
        for (i, (_, tests)), replies in zip(runs, results, strict=True):
            out[i] = self._verdict(tests, replies)
        return out

    def _prepare(self, item: Item) -> Verdict | tuple[Program, CodeTests]:
        tests = read_tests(item.metadata, self._settings.tests)
        if isinstance(tests, str):
            return unjudged(tests)
        source = extract_code(item.text)
        if source is None:
            return wrong("no code block in the response")
        if len(source) > MAX_SOURCE:
            return wrong(f"a program of {len(source)} characters; at most {MAX_SOURCE} are run")
        if self._settings.max_tests:
            tests = CodeTests(tests=tests.tests[: self._settings.max_tests], function=tests.function)
        inputs = tuple(Test(args=tuple(t.input)) if tests.function else Test(input=t.input) for t in tests.tests)
        return Program(source=source, tests=inputs, function=tests.function), tests

    def _verdict(self, tests: CodeTests, results: Sequence[TestResult]) -> Verdict:
        reasons = [
            self._failure(test, result, tests.function) for test, result in zip(tests.tests, results, strict=True)
        ]
        count, passed = len(reasons), reasons.count("")
        if passed == count:
            return Verdict(value=1.0, correct=True)
        first = next(i for i, reason in enumerate(reasons) if reason)
        if all(r.reason.startswith("the sandbox did not start") for r in results):
            return unjudged(results[0].reason)
        value = passed / count if self._settings.reward == "fraction" else 0.0
        return Verdict(
            value=value, correct=False, detail=f"{passed} of {count} tests passed; test {first + 1}: {reasons[first]}"
        )

    def _failure(self, test: CodeTest, result: TestResult, function: str) -> str:
        """Why a test failed, "" when it passed."""
        if result.reason:
            return result.reason
        tolerance = self._settings.tolerance
        if function:
            if not result.result:
                return "the function was not reached"
            return "" if same_value(result.result, test.output, tolerance) else f"wrong value {result.result[:60]}"
        return "" if same_output(result.out, test.output, tolerance) else f"wrong output '{result.out.strip()[:60]}'"


class Code(Component):
    """Verifies programs by tests: text on standard input, or calls of a function, with limits of time, memory and processes.

    A prompt's tests stand in its metadata under "tests". Programs run in bubblewrap; a host that cannot isolate them is
    refused. A program that hangs, breaks its limits or ends its sandbox is wrong with that reason; other programs do
    not notice.
    """

    paper = "2403.07974"

    @dataclass(frozen=True, kw_only=True)
    class Config(CodeSettings):
        """What is run, and how it counts."""

    config: Config
    _judge: CodeVerifier | None = None

    def setup(self, context: Context) -> None:
        """Finds a way to isolate programs, so that a host without one is refused before anything is sampled."""
        super().setup(context)
        settings = self.config
        way = plain(settings.interpreter, settings.packages)
        if not settings.allow_unsandboxed:
            way = find_isolation(settings.interpreter, settings.packages)
        self._judge = CodeVerifier(settings, way)

    def run(self) -> Outputs:
        """Returns the verifier, the same one every iteration."""
        assert self._judge is not None
        return Outputs(verifier=self._judge)
