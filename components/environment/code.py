"""Programs with feedback: an attempt that fails a test is answered with the test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from creditgraph.components.environment.base import EnvironmentComponent
from creditgraph.components.sandbox.isolation import Isolation, no_isolation
from creditgraph.components.sandbox.limits import Limits, at_once
from creditgraph.components.sandbox.pool import NO_START, Program, make_slots, run_programs
from creditgraph.components.sandbox.probe import find_isolation
from creditgraph.components.text.code_tests import extract_code, mismatch, read_tests
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.handles import Step

_LONGEST = 600  # characters of a failure that a policy is shown
# What it is shown of a private test, by the status of the test's result.
_FAILED = {
    "exit": "Wrong output, or an exception.",
    "signal": "The program was killed by a signal.",
    "timeout": "The program took too long.",
    "output": "The program wrote too much.",
    "skipped": "The test was not run: the program took too long before it.",
    "memory": "The program used too much memory.",
    "lost": "The program ended its sandbox.",
}


class CodeEpisode:
    """One episode; see `CodeFeedback`."""

    def __init__(self, config: CodeFeedback.Config, isolation: Isolation, slots: Any) -> None:
        self._config = config
        self._isolation = isolation
        self._slots = slots
        self._attempts = 0

    def reset(self, problem: dict[str, Any]) -> str:
        """The prompt as the data section made it."""
        self._tests = read_tests(problem, "all")
        return str(problem["prompt"])

    def step(self, text: str) -> Step:
        """Runs the program of a response; ends with the last attempt, or one that passes every test."""
        self._attempts += 1
        passed, said = self._run(extract_code(text))
        done = passed == 1.0 or self._attempts == self._config.attempts
        reward = passed if done and (passed == 1.0 or self._config.partial) else 0.0
        return Step(observation="" if done else self._config.feedback.format(said[:_LONGEST]), reward=reward, done=done)

    def close(self) -> None:
        """Nothing to release: a sandbox lives as long as its program."""

    def _run(self, source: str | None) -> tuple[float, str]:
        if source is None:
            return 0.0, "There is no ```python block in the response."
        tests = self._tests
        program = Program(source=source, inputs=[test.input for test in tests.tests], function=tests.function)
        results = run_programs([program], self._isolation, self._config.limits, 1, self._slots)[0]
        if all(result.reason.startswith(NO_START) for result in results):
            raise RuntimeError(results[0].reason)
        failures = [
            result.reason or mismatch(test, tests.function, result.out, result.result, self._config.tolerance)
            for test, result in zip(tests.tests, results, strict=True)
        ]
        first = next((i for i, failure in enumerate(failures) if failure), 0)
        public = tests.tests[first].public
        failure = f"Input: {tests.tests[first].input}\n{failures[first]}" if public else _FAILED[results[first].status]
        passed = failures.count("")
        return passed / len(failures), f"Passed {passed} of {len(failures)} tests. Test {first + 1} failed.\n{failure}"


class CodeFeedback(EnvironmentComponent):
    """Programs in a sandbox with feedback: a response whose program fails a test is answered with that failure.

    The tests are those of `verifier.code`. Of a private test the feedback has only how it failed: what the program
    printed or raised could be its input.
    """

    paper = "2403.07974"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Attempts, reward and sandbox."""

        attempts: int = 3
        """programs per episode"""
        partial: bool = False
        """whether the last attempt gets the share of tests that it passes, instead of 0"""
        feedback: str = "\n{}\nWrite the whole program again.\n"
        """text that answers a program which fails; {} is the failure"""
        tolerance: float = 1e-6
        """how far a number may be off where the expected one has a decimal point, as in `verifier.code`"""
        limits: Limits = field(default_factory=Limits)
        """per program"""
        workers: int = 0
        """programs at a time; 0 means one per core, at most 8"""
        allow_unsandboxed: bool = False
        """run programs without isolation if the host cannot isolate them; they can then do whatever you can"""

        def __post_init__(self) -> None:
            if self.attempts < 1 or not 0 <= self.workers <= 64 or "{}" not in self.feedback:
                raise ValueError("expected attempts ≥ 1, 0 ≤ workers ≤ 64 and {} in feedback.")

    config: Config

    def setup(self, context: Context) -> None:
        """Finds a way to isolate programs, so that a host without one is refused before anything is sampled."""
        super().setup(context)
        isolate = no_isolation if self.config.allow_unsandboxed else find_isolation
        self._isolation = isolate("", ())
        self.at_once = at_once(self.config.workers)
        self._slots = make_slots(self.at_once)

    def make(self) -> CodeEpisode:
        """A new episode."""
        return CodeEpisode(self.config, self._isolation, self._slots)
