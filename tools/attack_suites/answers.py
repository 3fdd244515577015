"""Poisoned answers of inference servers: what reaches the run is the sound answer to the request, or a sentence.

A server on a Unix socket speaks vLLM's or SGLang's HTTP. Its first answer is damaged, the later ones are sound; the
client must end with exactly the sound tokens, log-probs and entropies, by asking again, or with an error of the
project. Values that a model can give (another log-prob, for example) are no attack here: they need the server's key.
"""

import base64
import contextlib
import copy
import itertools
import json
import math
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from creditgraph.pipeline.core.errors import CreditgraphError

VOCABULARY = 50
TOKENS = 6
PROMPT = [3, 4]
SECONDS = 30.0
MISSING = object()
LABEL = "1-" + "c" * 32
SERVERS = ("vllm", "sglang")
OWN_CRC = "of the columns"
COLUMNS = {"tokens": "i", "logprobs": "f", "entropies": "f"}
ENTROPY = math.log(2)
# What no field may hold; numbers that a log-prob may have are not among them.
VALUES: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "a text": "x",
    "a huge integer": 10**400,
    "infinity": math.inf,
    "NaN": math.nan,
    "true": True,
    "an empty list": [],
    "an empty object": {},
    "1e30": 1e30,
    "-1e30": -1e30,
    "2.5": 2.5,
}


@dataclass(frozen=True)
class Case:
    """One damaged answer.

    Attributes:
        server: "vllm" or "sglang".
        kind: "row", "stream" or "score" of the request, or "control" of an update.
        name: what is damaged.
        poison: an answer's parts (JSON objects; one, but of a stream several) → the bytes of a whole HTTP response.
    """

    server: str
    kind: str
    name: str
    poison: Callable[[list[Any]], bytes]

    def __str__(self) -> str:
        return f"{self.server} {self.kind}: {self.name}"


def token_at(place: int) -> int:
    """The token that a sound server samples at a place."""
    return 2 + place * 7 % (VOCABULARY - 2)


def logprob_of(token: int) -> float:
    """Its log-prob."""
    return -0.1 - token / 100


def sound(server: str, kind: str, name: str) -> list[Any]:
    """The parts of the sound answer to request `name`."""
    tokens = [token_at(place) for place in range(TOKENS)]
    if kind == "score":
        return [_score(server, name, tokens)]
    cuts = [0, 1, 4, TOKENS] if kind == "stream" else [0, TOKENS]
    parts = _vllm_part if server == "vllm" else _sglang_part
    return [parts(name, tokens[a:b], b) for a, b in itertools.pairwise(cuts)]


def _vllm_part(request_id: str, tokens: list[int], end: int) -> Any:
    last = end == TOKENS
    return {
        "id": request_id,
        "tokens": tokens,
        "logprobs": [logprob_of(t) for t in tokens],
        "entropies": [ENTROPY] * len(tokens),
        "reason": "length" if last else None,
        "versions": [LABEL] if last else [],
        "crc": OWN_CRC,
    }


def _sglang_part(request_id: str, tokens: list[int], end: int) -> Any:
    meta: dict[str, Any] = {"id": request_id, "weight_version": LABEL, "completion_tokens": end}
    meta["finish_reason"] = {"type": "length", "length": TOKENS} if end == TOKENS else None
    meta["output_token_logprobs"] = [[logprob_of(t), t, None] for t in tokens]
    meta["output_top_logprobs"] = [[[-ENTROPY, 5, None], [-ENTROPY, 6, None]] for _ in tokens]
    return {"output_ids": tokens, "meta_info": meta}


def _score(server: str, request_id: str, tokens: list[int]) -> Any:
    if server == "vllm":
        return {**_vllm_part(request_id, tokens, TOKENS), "tokens": []}  # no most likely tokens were asked for
    # Two tokens of equal log-prob share the mass, so the score of each is −log 2.
    meta: dict[str, Any] = {"id": request_id, "weight_version": LABEL, "finish_reason": {"type": "length"}}
    meta["input_token_logprobs"] = [[None, PROMPT[-1], None], *([-ENTROPY, t, None] for t in tokens)]
    meta["input_top_logprobs"] = [None, *([[-ENTROPY, 5, None], [-ENTROPY, 6, None]] for _ in tokens)]
    return {"output_ids": [], "meta_info": meta}


# Damage


def response(body: bytes, status: str = "200 OK", length: int | None = None, extra: str = "") -> bytes:
    """A whole HTTP response."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n{extra}"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def columns(part: dict[str, Any]) -> dict[str, Any]:
    """A part of vLLM's answer as it is sent: what columns can hold in columns, their CRC in place of `OWN_CRC`."""
    sent = dict(part)
    for name, kind in COLUMNS.items():
        values = part.get(name)
        if isinstance(values, list) and not any(isinstance(value, bool) for value in values):
            with contextlib.suppress(struct.error, OverflowError):
                sent[name] = base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode()
    if sent.get("crc") == OWN_CRC:
        sent["crc"] = zlib.crc32("|".join(str(sent.get(name)) for name in COLUMNS).encode())
    return sent


def encoded(parts: list[Any], stream: bool) -> bytes:
    """The body of an answer."""
    parts = [columns(part) if isinstance(part, dict) and "meta_info" not in part else part for part in parts]
    if not stream:
        return json.dumps(parts[0]).encode()
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


def replaced(part: int, path: tuple[Any, ...], value: Any, stream: bool) -> Callable[[list[Any]], bytes]:
    """Puts a value at a path of one part."""

    def poison(parts: list[Any]) -> bytes:
        parts = copy.deepcopy(parts)
        holder = parts[part]
        for key in path[:-1]:
            holder = holder[key]
        if value is MISSING:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value
        return response(encoded(parts, stream))

    return poison


_META = ("meta_info",)
# Paths whose value an answer needs, and of them those that hold a version or id, which every other value contradicts.
PATHS: dict[tuple[str, str], list[tuple[Any, ...]]] = {
    ("vllm", "row"): [
        ("id",),
        ("tokens",),
        ("tokens", 1),
        ("logprobs",),
        ("logprobs", 0),
        ("entropies",),
        ("entropies", 0),
        ("crc",),
        ("versions",),
        ("versions", 0),
    ],
    ("vllm", "score"): [
        ("id",),
        ("logprobs",),
        ("logprobs", 2),
        ("entropies",),
        ("entropies", 2),
        ("crc",),
        ("versions",),
    ],
    ("sglang", "row"): [
        ("output_ids",),
        ("output_ids", 1),
        _META,
        (*_META, "id"),
        (*_META, "output_token_logprobs"),
        (*_META, "output_token_logprobs", 0, 0),
        (*_META, "output_token_logprobs", 0, 1),
        (*_META, "output_top_logprobs"),
        (*_META, "finish_reason"),
        (*_META, "weight_version"),
    ],
    ("sglang", "score"): [
        (*_META, "id"),
        (*_META, "input_token_logprobs"),
        (*_META, "input_token_logprobs", 1, 1),
        (*_META, "input_top_logprobs"),
        (*_META, "weight_version"),
    ],
}


def _whole(stream: bool) -> dict[str, Callable[[list[Any]], bytes]]:
    """Damage to a whole answer, of any kind of request."""

    def body(change: Callable[[bytes], bytes], **how: Any) -> Callable[[list[Any]], bytes]:
        return lambda parts: response(change(encoded(parts, stream)), **how)

    damage = {
        "an empty body": body(lambda b: b""),
        "HTML": body(lambda b: b"<html>gateway</html>"),
        "no JSON": body(lambda b: b"data: {nothing\n\n" if stream else b"{nothing"),
        "a list": body(lambda b: b"data: {}\n\n" if stream else b"[1, 2]"),
        "broken UTF-8": body(lambda b: b.replace(b'"', b"\xff\xfe", 3)),
        "100,000 brackets": body(lambda b: b'data: {"a": ' + b"[" * 100_000 if stream else b"[" * 100_000),
        "a body of 3 MB": body(lambda b: b'{"a": "' + b"x" * 3_000_000 + b'"}'),
        "a broken chunk": lambda parts: (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n" + encoded(parts, stream)
        ),
        "no HTTP": lambda parts: b"220 mail ready\r\n" + encoded(parts, stream),
        "a closed connection": lambda parts: b"",
        "a body that claims gzip": body(lambda b: b, extra="Content-Encoding: gzip\r\n"),
        "a body shorter than its length": lambda parts: response(encoded(parts, stream), length=10**6),
    }
    for status in (
        "204 No Content",
        "301 Moved",
        "401 Unauthorized",
        "404 Not Found",
        "429 Busy",
        "500 Error",
        "503 No",
    ):
        damage[f"status {status}"] = body(lambda b: b, status=status)
    for cut in range(5, 100, 12):
        damage[f"cut off after {cut} % of it"] = body(lambda b, cut=cut: b[: len(b) * cut // 100])  # type: ignore[misc]
    return damage


def _tokens(server: str, parts: list[Any], change: Callable[[list[int]], list[int]]) -> bytes:
    """Other tokens without their log-probs."""
    parts = copy.deepcopy(parts)
    name = "tokens" if server == "vllm" else "output_ids"
    crc = columns(parts[0]).get("crc")
    parts[0][name] = change(parts[0][name])
    if server == "vllm" and all(0 <= token < VOCABULARY for token in parts[0][name]):
        parts[0]["crc"] = crc  # of the sound ones: that tokens and log-probs belong together shows there only
    return response(encoded(parts, False))


def _rows(server: str) -> dict[str, Callable[[list[Any]], bytes]]:
    """Damage to the tokens of a row, and whole rows that are not the request's."""
    build = _vllm_part if server == "vllm" else _sglang_part
    own = [token_at(place) for place in range(TOKENS)]
    changes: dict[str, Callable[[list[int]], list[int]]] = {
        "the first token lost": lambda t: t[1:],
        "the last token lost": lambda t: t[:-1],
        "a token more": lambda t: [*t, 5],
        "tokens in another order": lambda t: t[::-1],
        "ids above the vocabulary": lambda t: [t[0] + VOCABULARY, *t[1:]],
        "negative ids": lambda t: [-1, *t[1:]],
    }
    rows = {text: (lambda parts, c=change: _tokens(server, parts, c)) for text, change in changes.items()}

    def other(request_id: Callable[[str], str], tokens: list[int]) -> Callable[[list[Any]], bytes]:
        def poison(parts: list[Any]) -> bytes:
            mine = parts[0]["id"] if server == "vllm" else parts[0]["meta_info"]["id"]
            return response(encoded([build(request_id(mine), tokens, TOKENS)], False))

        return poison

    rows["the answer to another request"] = other(lambda mine: "another", own[::-1])
    rows["too many tokens with their log-probs"] = other(lambda mine: mine, [*own, 5, 6])
    rows["too few tokens with their log-probs"] = other(lambda mine: mine, own[:-1])
    rows["no tokens"] = other(lambda mine: mine, [])
    rows["ids above the vocabulary with their log-probs"] = other(lambda mine: mine, [99, *own[1:]])
    return rows


def _events() -> dict[str, Callable[[list[Any]], bytes]]:
    """Damage to the order of a stream's events."""

    def order(*which: int) -> Callable[[list[Any]], bytes]:
        return lambda parts: response(encoded([parts[n] for n in which], True))

    return {
        "no last event": order(0, 1),
        "the last event alone": order(2),
        "the first event lost": order(1, 2),
        "an event lost": order(0, 2),
        "an event twice": order(0, 1, 1, 2),
        "the last event twice": order(0, 1, 2, 2),
        "the last event first": order(2, 0, 1),
        "no event": order(),
    }


CONTROL: dict[str, tuple[str, Any]] = {
    "another version": ("/weight_info", {"weight_version": "1-" + "d" * 32}),
    "an older version": ("/weight_info", {"weight_version": "0-" + "c" * 32}),
    "no version": ("/weight_info", {}),
    "a version that is a list": ("/weight_info", [1]),
    "other weights": ("/collective_rpc", {"results": [{"version": 1, "checksum": "d" * 32, "installed": True}]}),
    "workers of another version": ("/collective_rpc", {"results": [{"version": 2, "checksum": "c" * 32}]}),
    "no worker": ("/collective_rpc", {"results": []}),
    "a state of texts": ("/collective_rpc", {"results": ["x"]}),
    "a version beyond all numbers": ("/collective_rpc", {"results": [{"version": math.inf, "checksum": "c" * 32}]}),
    "results that are null": ("/collective_rpc", {"results": None}),
}


def cases() -> list[Case]:
    """All damaged answers."""
    return list(_cases())


def _cases() -> Iterator[Case]:
    for (server, kind), paths in PATHS.items():
        for path, (text, value) in itertools.product(paths, VALUES.items()):
            if path[0] == "entropies" and text == "2.5":  # which one may be
                continue
            yield Case(server, kind, f"{'.'.join(map(str, path))} is {text}", replaced(0, path, value, False))
    for server in SERVERS:
        for kind in ("row", "stream", "score"):
            for name, poison in _whole(kind == "stream").items():
                yield Case(server, kind, name, poison)
        for name, poison in _rows(server).items():
            yield Case(server, "row", name, poison)
        for name, poison in _events().items():
            yield Case(server, "stream", name, poison)
        # The first event has one token.
        paths = [path for path in PATHS[server, "row"] if len(path) < 4 and path[-1] != 1]
        for path, text in itertools.product(paths, ("null", "a text", "a huge integer")):
            if path[0] != "versions" and path[-1] != "finish_reason":  # of the last event only
                yield Case(server, "stream", f"{path} is {text}", replaced(0, path, VALUES[text], True))
        last = ("versions",) if server == "vllm" else (*_META, "weight_version")
        yield Case(server, "stream", "no version in the last event", replaced(2, last, None, True))
    for name, (_, body) in CONTROL.items():
        yield Case("vllm", "control", name, lambda parts, b=body: response(json.dumps(b).encode()))


def quick() -> list[Case]:
    """Every tenth."""
    return cases()[::10]


def run(case: Case) -> tuple[bool, str]:
    """Whether the client ended with the sound answer, or with an error of the project; and which of them."""
    from attack_suites.poisoned import GENERATE, Bench

    ended: list[tuple[bool, str]] = []

    def attempt() -> None:
        bench = Bench(case.server)
        try:
            if case.kind == "control":
                bench.server.poison = ({CONTROL[case.name][0]}, case.poison)
                label = bench.update()
                ended.append((label == LABEL, f"the server is used with weights version {label}"))
                return
            bench.update()
            bench.server.poison = (GENERATE, case.poison)
            ended.append(_judge(case, bench))
        except CreditgraphError as error:
            ended.append((True, f"refused: {str(error)[:200]}"))
        except Exception as error:
            ended.append((False, f"{type(error).__name__}: {str(error)[:200]}"))
        finally:
            bench.close()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return ended[0] if ended else (False, f"no end within {SECONDS:g} s")


def _judge(case: Case, bench: Any) -> tuple[bool, str]:
    own = [token_at(place) for place in range(TOKENS)]
    tokens, logprobs, entropies = bench.score(own) if case.kind == "score" else bench.sample(case.kind == "stream")
    sglang_score = (case.server, case.kind) == ("sglang", "score")
    expected = [-ENTROPY if sglang_score else logprob_of(token) for token in own]
    held = (
        tokens == own
        and len(logprobs) == len(entropies) == TOKENS
        and all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(logprobs, expected, strict=True))
        and all(math.isclose(value, ENTROPY, abs_tol=1e-5) for value in entropies)
    )
    asked = bench.server.answers
    return held, f"{'the sound answer' if held else 'another answer was taken'} after {asked} requests"
