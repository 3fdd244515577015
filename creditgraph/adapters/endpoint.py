"""A policy that scores texts at an OpenAI-compatible endpoint, for credit graphs that need log-probs of a reference."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch

from creditgraph.components.http import Client
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.handles import Completions, Policy, Requests, Scores
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.run.compose.secrets import public

RETRIES = 3
"""further tries of a request after a failure that may pass"""


class EndpointPolicy(Policy):
    """Scores tokens with POST {url}/completions, whose prompts are token ids and whose `echo` gives their log-probs.

    vLLM's server has both; it must hold the weights that are trained, or those that credit is to be judged by.
    Entropies are unknown (NaN), and nothing is sampled. It needs httpx, which the extra `train` brings.

    Args:
        url: with the version, such as "http://localhost:8000/v1".
        model: the name that the server gives it.
        tokenizer: of the same model.
        batch: prompts per request, whose reply may have 64 MiB.
        concurrency: requests at a time.
        seconds: limit of a request, which has three further tries where the server is busy or does not answer.
        key: sent as a bearer token.
    """

    version = 0

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Any,
        *,
        batch: int = 16,
        concurrency: int = 4,
        seconds: float = 120.0,
        key: str = "",
    ) -> None:
        self.url = f"{url.rstrip('/')}/completions"
        self.model, self.tokenizer = model, tokenizer
        self.batch, self.concurrency, self.seconds, self.key = batch, concurrency, seconds, key

    def generate(self, requests: Requests) -> Completions:
        """Raises RunError: the trainer samples."""
        raise RunError(f"{self.url}: this policy scores texts and samples none; the trainer samples responses.")

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """Log-probs at temperature 1, the only one such an endpoint has; see `Policy.score`."""
        if temperature != 1 or top:
            raise RunError(
                f"{self.url}: asked for log-probs at temperature {temperature:g} and {top} further tokens; an endpoint "
                "gives those of the given tokens at temperature 1. Choose a graph that needs no more, or set "
                "Rollouts.temperature=1."
            )
        rows = [a + b for a, b in zip(context.to_lists(), tokens.to_lists(), strict=True)]
        parts = [rows[i : i + self.batch] for i in range(0, len(rows), self.batch)]
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # The client closes first, also after an error or Ctrl-C: the pool does not wait for replies then.
        with (
            ThreadPoolExecutor(self.concurrency) as pool,
            closing(Client("EndpointPolicy", headers, self.concurrency)) as client,
        ):
            replies = [row for part in pool.map(lambda part: self._request(client, part), parts) for row in part]
        found = [
            torch.tensor(row[len(r) - n : len(r)]) for row, r, n in zip(replies, rows, tokens.lengths, strict=True)
        ]
        logprobs = tokens.with_values(torch.cat(found).float() if found else torch.zeros(0))
        return Scores(logprobs=logprobs, entropies=logprobs.with_values(torch.full_like(logprobs.values, torch.nan)))

    def _request(self, client: Client, rows: list[list[int]]) -> list[list[float]]:
        """Log-probs of all tokens of each row; NaN for its first one."""
        body = {"model": self.model, "prompt": rows, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 1.0}
        reply, reason = client.post(self.url, body, seconds=self.seconds, retries=RETRIES)
        try:
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            found = [choice["logprobs"]["token_logprobs"] for choice in choices]
            if [len(row) - 1 for row in found] != [len(row) for row in rows]:
                raise ValueError("a reply without the log-probs of the prompt's tokens")
            return [[torch.nan if x is None else float(x) for x in row] for row in found]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{reason or f'{public(self.url)}: {error}'}; expected the reply of an OpenAI-compatible server to "
                "token ids with echo and logprobs (vLLM's has both)."
            ) from error
