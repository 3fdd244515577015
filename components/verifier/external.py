"""A verifier on a server: a reward model, a language model that grades proofs, a cluster of sandboxes."""

from dataclasses import dataclass
from typing import Any

from creditgraph.components.http import Server, ServerSettings, check_url, number
from creditgraph.components.verifier.base import Item, Outputs, Verdict, VerifierComponent, undecided
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.metric import Metric


class External(VerifierComponent):
    """Verifies through requests to a server, in batches and several at a time.

    Request: {"items": [{"response", "extracted", "answer", "metadata"}]}. Response, in the same order: {"results":
    [{"value": number, "correct": bool, "valid": bool, "detail": text}]}; correct defaults to value ≥ 1, valid to true.
    A batch that fails after all retries is invalid (zero credit) with the reason; it is requested again the next time
    its rows are verified.
    """

    metrics = (Metric("failures", "items", "verdicts the server did not return since the run began"),)

    @dataclass(frozen=True, kw_only=True)
    class Config(ServerSettings):
        """The server, its requests and their limits."""

        url: str = "http://127.0.0.1:8080/verify"
        """URL for POST requests"""

        def __post_init__(self) -> None:
            check_url(self.url)
            super().__post_init__()

    config: Config

    def setup(self, context: Context) -> None:
        """Makes the client; nothing is sent yet."""
        super().setup(context)
        self.failures = 0
        self._server = Server(self.config.url, self.config)

    def run(self) -> Outputs:
        """Returns the verifier and logs the number of failures so far."""
        self.context.log(failures=self.failures)
        return super().run()

    def close(self) -> None:
        """Closes the connections."""
        self._server.close()

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item, also if the server fails."""
        sent = [
            {"response": i.text, "extracted": i.extracted(), "answer": i.answer, "metadata": i.metadata} for i in items
        ]
        results = self._server.results(sent)
        self.failures += sum(reason != "" for _, reason in results)
        return [
            Verdict(value=0.0, correct=False, valid=False, detail=reason, keep=False) if reason else _verdict(result)
            for result, reason in results
        ]


def _verdict(result: Any) -> Verdict:
    result = result if isinstance(result, dict) else {}
    value = number(result.get("value"))
    if value is None:
        return undecided(f"the server's result has no finite number as value: {str(result)[:60]}")
    correct, valid = result.get("correct", value >= 1.0), result.get("valid", True)
    if not isinstance(correct, bool) or not isinstance(valid, bool):
        return undecided(f"the server's 'correct' and 'valid' are not true or false: {str(result)[:60]}")
    return Verdict(value=value, correct=correct, valid=valid, detail=str(result.get("detail") or "")[:500])
