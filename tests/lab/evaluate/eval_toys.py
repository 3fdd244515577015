"""A verifier that writes down what it verifies, and can end its own process in the middle of an evaluation."""

import os
import signal

from creditgraph.components.verifier.exact import Exact


class LoggedExact(Exact):
    """verifier.exact with a line per response in the file EVAL_TOYS_LOG; EVAL_TOYS_KILL=3 kills it in call 3."""

    calls = 0

    def verify(self, prompts, trajectories):
        self.calls += 1
        for name, number in (("EVAL_TOYS_KILL", signal.SIGKILL), ("EVAL_TOYS_TERM", signal.SIGTERM)):
            if self.calls == int(os.environ.get(name, "0")):
                os.kill(os.getpid(), number)
        with open(os.environ["EVAL_TOYS_LOG"], "a", encoding="utf-8") as log:
            log.writelines(f"{int(uid)}\n" for uid in trajectories.prompt_uid)
        return super().verify(prompts, trajectories)
