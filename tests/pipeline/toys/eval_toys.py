"""A verifier that writes down what it judges, and can end its own process in the middle of an evaluation."""

import os
import signal
from dataclasses import dataclass

from components.verifier.exact import ExactVerifier
from pipeline.core.component import Component
from pipeline.core.payloads import Verifier


class LoggedVerifier(ExactVerifier):
    """Appends a line per judged response to the file EVAL_TOYS_LOG; EVAL_TOYS_KILL=3 kills the process in the third call."""

    calls = 0

    def verify(self, prompts, trajectories):
        self.calls += 1
        for name, number in (("EVAL_TOYS_KILL", signal.SIGKILL), ("EVAL_TOYS_TERM", signal.SIGTERM)):
            if self.calls == int(os.environ.get(name, "0")):
                os.kill(os.getpid(), number)
        with open(os.environ["EVAL_TOYS_LOG"], "a", encoding="utf-8") as log:
            log.writelines(f"{int(uid)}\n" for uid in trajectories.prompt_uid)
        return super().verify(prompts, trajectories)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    verifier: Verifier


class LoggedExact(Component):
    """verifier.exact with a log."""

    def run(self) -> Outputs:
        return Outputs(verifier=LoggedVerifier(True))
