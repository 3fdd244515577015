"""A policy that scores and continues texts at an OpenAI-compatible endpoint, for credit graphs that ask a model."""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
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
# Else a server takes what the model's generation_config.json recommends, top_k=20 for example.
WHOLE: dict[str, Any] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""fields of requests that sample from the whole distribution"""


class EndpointPolicy(Policy):
    """Asks POST {url}/completions, with token ids: `echo` gives log-probs of texts, `return_token_ids` continues them.

    The servers of vLLM and SGLang have both; the server must hold the weights that are trained, or those that credit is
    to be judged by. Entropies are unknown (NaN). It needs httpx, which the extra `train` brings.

    Args:
        url: with the version, such as "http://localhost:8000/v1"; of several, each is asked for a part of the rows.
        model: the name that the server gives it; by default the first one that the server lists.
        tokenizer: of the same model; None is that of the graph that is given the policy.
        batch: rows that are scored per request, whose reply may have 64 MiB; a row that is continued is a request.
        concurrency: rows at a time.
        seconds: limit of a request, which has three further tries where the server is busy or does not answer.
        key: sent as a bearer token.
        sampling: further fields of requests for continuations, such as {"top_p": 0.95}.
    """

    version = 0

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "",
        tokenizer: Any = None,
        *,
        batch: int = 16,
        concurrency: int = 64,
        seconds: float = 1800.0,
        key: str = "",
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.urls = [one.rstrip("/") for one in ([url] if isinstance(url, str) else url)]
        self.model, self.tokenizer = model, tokenizer
        self.batch, self.concurrency, self.seconds, self.key = batch, concurrency, seconds, key
        self.sampling = dict(sampling or {})

    def generate(self, requests: Requests) -> Completions:
        """One request per row, with its own seed; log-probs are known at temperature 1, and 0, alone."""
        asked = requests.sampling
        if asked.thoughts is not None or asked.stop:
            raise RunError(
                f"{public(self.urls[0])}: asked to sample up to a stop string, whose tokens an endpoint does not tell "
                "apart. Set the node's mode to plain, line or sentence, and leave its stop empty."
            )
        rows = requests.tokens.to_lists()
        budgets = [asked.max_tokens] * len(rows) if requests.max_tokens is None else requests.max_tokens.tolist()
        fixed = {
            "temperature": asked.temperature,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        fixed |= WHOLE | {"top_p": asked.top_p} | ({"top_k": asked.top_k} if asked.top_k else {}) | self.sampling
        bodies = [
            {"prompt": row, "max_tokens": most, "seed": seed >> 32 & 0x7FFFFFFF, **fixed}
            for row, most, seed in zip(rows, budgets, requests.seed.tolist(), strict=True)
        ]
        done = self._asked(bodies, _continuation, self.concurrency)
        tokens = Jagged.from_rows([ids for ids, _, _ in done], torch.int32)
        known = Jagged.from_rows([x for _, x, _ in done], torch.float32)
        if asked.temperature not in (0, 1):
            known = known.with_values(torch.full_like(known.values, torch.nan))
        ended = [ids[-1:] == [self.tokenizer.eos_token_id] for ids, _, _ in done]
        return Completions(
            tokens=tokens,
            logprobs=known,
            entropies=known.with_values(torch.full_like(known.values, torch.nan)),
            thought_ends=Jagged.from_rows([[] for _ in done], torch.int32),
            finish_reason=["eos" if e else reason for e, (_, _, reason) in zip(ended, done, strict=True)],
            text=self.tokenizer.batch_decode([ids for ids, _, _ in done]),
        )

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """Log-probs at temperature 1, the only one such an endpoint has; see `Policy.score`."""
        if temperature != 1 or top:
            raise RunError(
                f"{public(self.urls[0])}: asked for log-probs at temperature {temperature:g} and {top} further tokens; "
                "an endpoint gives those of the given tokens at temperature 1. Choose a graph that needs no more, or "
                "set Rollouts.temperature=1."
            )
        rows = [a + b for a, b in zip(context.to_lists(), tokens.to_lists(), strict=True)]
        parts = [rows[i : i + self.batch] for i in range(0, len(rows), self.batch)]
        fixed = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 1.0}
        at_once = max(1, self.concurrency // self.batch)
        replies = self._asked([{"prompt": part, **fixed} for part in parts], _logprobs, at_once)
        found = [
            torch.tensor(row[len(r) - n : len(r)])
            for row, r, n in zip((x for part in replies for x in part), rows, tokens.lengths, strict=True)
        ]
        logprobs = tokens.with_values(torch.cat(found).float() if found else torch.zeros(0))
        return Scores(logprobs=logprobs, entropies=logprobs.with_values(torch.full_like(logprobs.values, torch.nan)))

    def _asked(self, bodies: list[dict[str, Any]], read: Callable[[Any, Any], Any], at_once: int) -> list[Any]:
        """Of each request what `read` makes of its prompt and the choices of its reply."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # A server that gets new weights may keep what it computed with the old ones: calls share none of it.
        fixed = {"cache_salt": uuid.uuid4().hex}

        def ask(place: int) -> Any:
            # Rows next to each other begin alike, so a server that has one keeps much of the next.
            url = f"{self.urls[place * len(self.urls) // len(bodies)]}/completions"
            body = bodies[place] | fixed
            reply, reason = client.post(url, body, seconds=self.seconds, retries=RETRIES)
            try:
                return read(body["prompt"], sorted(reply["choices"], key=lambda choice: choice["index"]))
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(
                    f"{reason or f'{public(url)}: {error}'}; expected the reply of an OpenAI-compatible server to "
                    "token ids with echo and logprobs, or with return_token_ids (vLLM's and SGLang's have both)."
                ) from error

        # The client closes first, also after an error or Ctrl-C: the pool does not wait for replies then.
        with ThreadPoolExecutor(at_once) as pool, closing(Client("EndpointPolicy", headers, at_once)) as client:
            fixed["model"] = self.model or self._listed(client)
            return list(pool.map(ask, range(len(bodies))))

    def _listed(self, client: Client) -> str:
        """The name of the first model that the server lists."""
        url = f"{self.urls[0]}/models"
        reply, reason = client.post(url, None, seconds=self.seconds, retries=RETRIES)
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, TypeError, IndexError) as error:
            raise RunError(f"{reason or f'{public(url)}: {error}'}; expected a list of models.") from error


def _continuation(_: list[int], choices: list[Any]) -> tuple[list[int], list[float], str]:
    """Tokens, their log-probs, and why they end."""
    (choice,) = choices
    ids = [int(token) for token in choice["token_ids"]]
    known = _numbers((choice.get("logprobs") or {}).get("token_logprobs") or [])
    return ids, known if len(known) == len(ids) else [torch.nan] * len(ids), str(choice["finish_reason"])


def _logprobs(rows: list[list[int]], choices: list[Any]) -> list[list[float]]:
    """Log-probs of all tokens of each row; NaN for its first one."""
    found = [choice["logprobs"]["token_logprobs"] for choice in choices]
    if [len(row) - 1 for row in found] != [len(row) for row in rows]:
        raise ValueError("a reply without the log-probs of the prompt's tokens")
    return [_numbers(row) for row in found]


def _numbers(given: Iterable[Any]) -> list[float]:
    return [torch.nan if x is None else float(x) for x in given]
