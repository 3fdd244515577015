"""A server in this process that damages its first answer, and the client's pool in front of it; for `answers`."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from attack_suites import answers
from creditgraph.components.engine.base import Limits
from creditgraph.components.engine.channel import Update
from creditgraph.components.engine.messages import ScoreRequest
from creditgraph.components.engine.rows import Rows
from creditgraph.components.engine.served import dialect as served
from creditgraph.components.engine.served.addresses import Address
from creditgraph.components.engine.served.dialect import Dialect, ServedModel
from creditgraph.components.engine.served.pool import ServerPool
from creditgraph.components.engine.served.settings import PoolSettings
from creditgraph.components.engine.sglang.dialect import SGLangDialect
from creditgraph.components.engine.sglang.settings import SGLangSettings
from creditgraph.components.engine.vllm.dialect import VllmDialect
from creditgraph.components.engine.vllm.settings import VllmSettings
from creditgraph.components.text.stops import TokenText
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged

GENERATE = {"/creditgraph/rows", "/generate"}
LARGEST = 1 << 20  # bytes of a response here, so that one beyond the limit is small


class Words:
    """Token id = code point."""

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        """The texts of rows."""
        return ["".join(map(chr, row)) for row in rows]

    def decode(self, row: list[int], **_: Any) -> str:
        """The text of a row."""
        return "".join(map(chr, row))


class PoisonedServer:
    """A server on a Unix socket, in a thread.

    Args:
        socket: path of its socket.
        kind: "vllm" or "sglang".

    Attributes:
        poison: path of a request and what damages the next answer to it; None once it has.
        answers: number of requests to generate.
    """

    def __init__(self, socket: Path, kind: str) -> None:
        self.kind = kind
        self.poison: tuple[set[str], Callable[[list[Any]], bytes]] | None = None
        self.answers = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, str(socket)))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((line for line in head.splitlines() if line.lower().startswith("content-length:")), ":0")
            body = json.loads(await reader.readexactly(int(length.partition(":")[2])) or b"{}")
            writer.write(self._answer(head.split()[1].partition("?")[0], body))
            await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str, body: dict[str, Any]) -> bytes:
        parts = self._sound(path, body)
        if self.poison is not None and path in self.poison[0]:
            poison = self.poison[1]
            self.poison = None
            return poison(parts)
        return answers.response(answers.encoded(parts, bool(body.get("stream"))))

    def _sound(self, path: str, body: dict[str, Any]) -> list[Any]:
        if path in GENERATE:
            self.answers += 1
            scored = "context" in body or "logprob_start_len" in body
            kind = "score" if scored else "stream" if body.get("stream") else "row"
            return answers.sound(self.kind, kind, str(body.get("id") or body.get("rid")))
        state = {"version": 1, "checksum": "c" * 32, "installed": True}
        return [
            {
                "/v1/models": {"data": [{"id": "poisoned"}]},
                "/weight_info": {"weight_version": answers.LABEL},
                "/model_info": {"weight_version": answers.LABEL},
                "/collective_rpc": {"results": [state]},
            }.get(path, {"success": True})
        ]


class Bench:
    """A poisoned server with its client.

    Args:
        kind: "vllm" or "sglang".
    """

    def __init__(self, kind: str) -> None:
        served.LARGEST_RESPONSE = LARGEST
        self._folder = TemporaryDirectory(prefix="creditgraph-answers-")
        folder = Path(self._folder.name)
        self.server = PoisonedServer(folder / "http", kind)
        model = ServedModel(path="none", dtype="float32", context_length=64, vocab_size=answers.VOCABULARY, eos=[1])
        dialect: Dialect = (
            VllmDialect(VllmSettings(), model) if kind == "vllm" else SGLangDialect(SGLangSettings(), model)
        )
        settings = PoolSettings(start_seconds=20.0, update_seconds=20.0, hang_seconds=20.0)
        self.pool = ServerPool(dialect, settings, [Address(url=f"unix:{folder}/http")], folder)
        self.pool.start()

    def update(self) -> str:
        """Has the client verify the weights of the server; returns the label that it then expects."""
        checksum = Future[str]()
        checksum.set_result("c" * 32)
        self.pool.update(Update(version=1, checksum=checksum, loaded=True))
        return str(self.pool.servers[0].label)

    def sample(self, stream: bool) -> tuple[list[int], list[float], list[float]]:
        """Tokens, log-probs and entropies of one row."""
        requests = Requests(
            tokens=Jagged.from_rows([answers.PROMPT], torch.int32),
            seed=torch.tensor([7]),
            sampling=Sampling(max_tokens=answers.TOKENS, stop=("\x01\x01",) if stream else ()),
        )
        eos = torch.zeros(answers.VOCABULARY, dtype=torch.bool)
        limits = Limits(tokens=torch.tensor([answers.TOKENS]), thoughts=torch.tensor([0]), eos=eos)
        rows = Rows(requests, limits, TokenText(Words(), answers.VOCABULARY), Words(), answers.VOCABULARY)
        self.pool.generate(rows.start(), rows.feed, rows.reset)
        done = rows.completions()
        return done.tokens.values.tolist(), done.logprobs.values.tolist(), done.entropies.values.tolist()

    def score(self, tokens: list[int]) -> tuple[list[int], list[float], list[float]]:
        """The same of given tokens."""
        request = ScoreRequest(row=0, group=0, context=answers.PROMPT, tokens=tokens, temperature=1.0)
        (response,) = self.pool.score([request])
        return tokens, response.logprobs, response.entropies or []

    def close(self) -> None:
        """Ends client and server."""
        self.pool.close()
        self.server.close()
        self._folder.cleanup()
