"""An external judge that names the first wrong step of each failure: a model behind an OpenAI-compatible server.

Every answer is kept in a file beside the run, under a key of model and request, so that a second call asks only what
has no answer yet.
"""

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from creditgraph.components.http import Client
from creditgraph.components.localizer.self_localizer import parse_step
from creditgraph.components.text.templates import localize_request
from creditgraph.lab.localization.labels import Labels
from creditgraph.lab.localization.records import Failure
from creditgraph.pipeline.core.errors import ConfigError, RunError, extra
from creditgraph.pipeline.run.metrics import read_lines
from creditgraph.pipeline.run.run_directory import make_folder

KEY = "OPENAI_API_KEY"  # environment variable
GIVE_UP = 16  # failed requests in a row
REPORT_EVERY = 50  # answers
_BARE = re.compile(r"[^\w-]*(-?\d+)\W*")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """The server, and its requests.

    Attributes:
        url: base URL, to which /chat/completions is appended.
        model: name of the model.
        max_tokens: budget of an answer.
        concurrency: requests at a time.
        seconds: limit of one try.
        retries: further tries after a temporary failure.
        wait: seconds before the first further try; doubled each time.
    """

    url: str
    model: str
    max_tokens: int = 4096
    concurrency: int = 8
    seconds: float = 120.0
    retries: int = 3
    wait: float = 0.5

    def __post_init__(self) -> None:
        with extra("train", "--judge"):
            import httpx

        try:
            sound = httpx.URL(self.url).scheme in ("http", "https") and bool(httpx.URL(self.url).host)
        except httpx.InvalidURL:
            sound = False
        if not sound:
            raise ConfigError(f"--judge {self.url}: expected the server's base URL, such as http://127.0.0.1:8000/v1.")
        if min(self.max_tokens, self.concurrency) < 1 or self.seconds <= 0:
            raise ConfigError("--max-tokens, --concurrency, --seconds: expected positive numbers.")


def request(failure: Failure) -> str:
    """What the judge is asked: as in self-localisation, and the reference answer and solution where there are any."""
    parts = [localize_request(failure.problem, failure.steps)]
    if failure.answer:
        parts.append(f"The right answer to the problem is: {failure.answer}\n")
    if failure.solution:
        parts.append(f"A right solution:\n{failure.solution}\n")
    return "\n".join(parts)


def judge_labels(
    settings: JudgeSettings, failures: Sequence[Failure], cache: Path, progress: Callable[[str], None]
) -> Labels:
    """The step that the judge names, of each failure.

    An answer that names no step is no label, and neither is a request that failed: both are counted. Failed requests
    are asked again by the next call.

    Args:
        settings: the server.
        failures: to be judged.
        cache: JSONL file of all answers so far, to which new ones are appended.
        progress: called with a line every 50 requests.

    Raises:
        RunError: the first request fails.
    """
    keys = {f.uid: _key(settings, f) for f in failures}
    answers = {row["key"]: row["answer"] for row in read_lines(cache) if {"key", "answer"} <= row.keys()}
    missing = {keys[f.uid]: f for f in failures if keys[f.uid] not in answers}
    labels = Labels(f"judge {settings.model}")
    if missing:
        new, reasons = _ask(settings, missing, cache, progress)
        answers |= new
        for reason, count in reasons.most_common(3):
            labels.notes.append(
                f"requests to the judge that failed: {count} ({reason}); the next call sends them again"
            )
    for failure in failures:
        answer = answers.get(keys[failure.uid])
        if answer is None:
            labels.unlabelled["request failed"] += 1
            continue
        verdict = parse_step(_boxed(answer), len(failure.steps))
        if verdict.source != "default":
            labels.add(failure, verdict.step)
            labels.out_of_range += verdict.out_of_range
        else:
            labels.unlabelled["out of range" if verdict.out_of_range else "no number"] += 1
    return labels


def _boxed(answer: str) -> str:
    """The answer; one that is a bare number gets the box that the request asks for."""
    bare = _BARE.fullmatch(answer)
    return f"\\boxed{{{bare[1]}}}" if bare else answer


def _key(settings: JudgeSettings, failure: Failure) -> str:
    # Without the address: a server that has moved gives the same answers.
    content = json.dumps([settings.model, settings.max_tokens, request(failure)])
    return hashlib.sha256(content.encode()).hexdigest()


def _ask(
    settings: JudgeSettings, missing: dict[str, Failure], cache: Path, progress: Callable[[str], None]
) -> tuple[dict[str, str], Counter[str]]:
    """New answers by key, each written as it comes, and why requests failed."""
    answers: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    headers = {"Authorization": f"Bearer {os.environ[KEY].strip()}"} if os.environ.get(KEY) else {}
    (first, failure), *others = missing.items()
    pool = ThreadPoolExecutor(settings.concurrency)
    with contextlib.closing(Client("--judge", headers)) as client:
        # The first one alone, so that a wrong address or model costs one request.
        answer, reason = _answer(client, settings, failure)
        if answer is None:
            raise RunError(
                f"--judge: the first of {len(missing)} requests failed ({reason}). Expected a server with POST "
                f"/chat/completions and the model '{settings.model}'; a key goes into {KEY}."
            )
        answers[first] = answer
        _append(cache, {"key": first, "uid": str(failure.uid), "model": settings.model, "answer": answer})
        asked = {pool.submit(_answer, client, settings, f): (key, f) for key, f in others}
        in_a_row = 0
        try:
            for done, future in enumerate(as_completed(asked), 2):
                answer, reason = future.result()
                if answer is None:
                    reasons[reason] += 1
                    in_a_row += 1
                    if in_a_row == GIVE_UP:
                        break
                    continue
                in_a_row = 0
                key, failure = asked[future]
                answers[key] = answer
                _append(cache, {"key": key, "uid": str(failure.uid), "model": settings.model, "answer": answer})
                if done % REPORT_EVERY == 0:
                    progress(f"judge: {done} of {len(missing)} requests")
        finally:  # after Ctrl-C it would otherwise wait for all others
            pool.shutdown(wait=False, cancel_futures=True)
    left = len(missing) - len(answers) - reasons.total()
    if left:
        reasons[f"given up after {GIVE_UP} failures in a row"] = left
    return answers, reasons


def _answer(client: Client, settings: JudgeSettings, failure: Failure) -> tuple[str | None, str]:
    """The text of one answer, or None and why there is none."""
    url = f"{settings.url.rstrip('/')}/chat/completions"
    body = {
        "model": settings.model,
        "messages": [{"role": "user", "content": request(failure)}],
        "temperature": 0,
        "max_tokens": settings.max_tokens,
    }
    reply, reason = client.post(url, body, seconds=settings.seconds, retries=settings.retries, wait=settings.wait)
    if reason:
        return None, reason
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, TypeError, IndexError):
        return None, f"{url}: the response is no chat completion"
    # Reasoning models that spend their budget before they answer return null.
    return ("", "") if text is None else (str(text), "")


def _append(file: Path, row: dict[str, str]) -> None:
    """Adds a line; a last one that was cut off is ended first, so that only it is lost."""
    make_folder(file.parent, "--output DIR")
    with file.open("ab+") as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(max(size - 1, 0))
        whole = lines.read() in (b"", b"\n")
        lines.write(("" if whole else "\n").encode() + json.dumps(row).encode() + b"\n")
