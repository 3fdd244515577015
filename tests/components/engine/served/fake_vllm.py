"""A server that speaks vLLM's HTTP after milliseconds: `python fake_vllm.py --port P --served-model-name N …`.

Token t of a completion is a function of (weights version, seed, place), so that a test can tell which answers are
right. `--fault FILE` names a JSON file that is read at every request: {"kind": "garbage"}, {"kind": "500"}, …, and
tests change it while the server runs.
"""

import argparse
import base64
import hashlib
import json
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

VOCABULARY = 50
MASK = (1 << 64) - 1
SPREAD = 0x9E3779B97F4A7C15


def token_at(seed: int, place: int) -> int:
    return 2 + (seed * 31 + place * 7) % (VOCABULARY - 2)


def logprob_at(version: int, token: int) -> float:
    return -0.1 - 0.001 * token - 0.01 * (version % 10)


def column(kind: str, values) -> str:
    """`creditgraph.components.engine.vllm.columns` as a plain loop: "i" for ids, "f" for numbers."""
    return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode()


def columns(name, tokens, logprobs, entropy, reason, versions):
    texts = [column("i", tokens), column("f", logprobs), column("f", [entropy] * len(logprobs))]
    whole = dict(zip(("tokens", "logprobs", "entropies"), texts, strict=True))
    return {**whole, "id": name, "reason": reason, "versions": versions, "crc": zlib.crc32("|".join(texts).encode())}


def ids_of(text: str) -> list[int]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def factor(n: int) -> int:
    """The n-th number of SplitMix64, made odd."""
    z = (n + 1) * SPREAD & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) | 1


def sum_of_words(data: bytes) -> int:
    words = struct.unpack(f"<{-(-len(data) // 4)}i", data + bytes(-len(data) % 4))
    total = sum(word * factor(n % 65536) * (2 * (n // 65536) * SPREAD + 1) for n, word in enumerate(words))
    return total & MASK


def checksum_of(files: list[str]) -> str:
    """`creditgraph.components.engine.weight_files.Checksum` of all tensors, as a plain loop."""
    lines = {}
    for file in files:
        raw = Path(file).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                dtype = {"F32": "torch.float32", "BF16": "torch.bfloat16"}[entry["dtype"]]
                data = raw[8 + length :][start:end]
                lines[name] = f"{name} {dtype} {tuple(entry['shape'])} {sum_of_words(data):016x}"
    return hashlib.sha256("\n".join(lines[name] for name in sorted(lines)).encode()).hexdigest()[:32]


def lines_of(forms: list, data: bytes) -> dict[str, str]:
    """Of `Checksum`, for float32 tensors one after the other."""
    lines, start = {}, 0
    for name, kind, shape in forms:
        size = 4 * math.prod(shape)
        lines[name] = f"{name} torch.{kind} {tuple(shape)} {sum_of_words(data[start : start + size]):016x}"
        start += size
    return lines


class State:
    coming: tuple[int, dict[str, str]]
    free = 60  # the number after a sleep has a digit more

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.version, self.reported, self.checksum, self.installed = -1, "default", "", False
        self.paused = False
        self.changed = threading.Condition()
        self.running: dict[str, dict] = {}
        self.tokens = 0

    def fault(self) -> dict:
        try:
            return json.loads(Path(self.options.fault).read_text())
        except (OSError, ValueError):
            return {}

    def die(self) -> None:
        """Once: the server that is started in its place lives."""
        Path(self.options.fault).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    def log(self, **entry) -> None:
        if self.options.record:
            with open(self.options.record, "a") as file:
                file.write(json.dumps({"server": self.options.port, **entry}) + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.route({})

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.route(json.loads(self.rfile.read(length) or b"{}"))

    def reply(self, body, status=200, raw=None):
        data = json.dumps(body).encode() if raw is None else raw
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def route(self, body):
        state, url = self.state, urlparse(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        fault = state.fault().get("kind", "")
        path = url.path
        if self.headers.get("Authorization") != f"Bearer {os.environ.get('CREDITGRAPH_SERVER_KEY')}":
            return self.reply({"error": "Unauthorized"}, 401)
        if path == "/health":
            return self.reply({})
        if path == "/v1/models":
            return self.reply({"data": [{"id": state.options.served_model_name}]})
        if path == "/metrics":
            return self.reply(None, raw=f'vllm:generation_tokens_total{{engine="0"}} {state.tokens}.0\n'.encode())
        if path == "/weight_info":
            return self.reply({"weight_version": state.reported})
        if path == "/update_weight_version":
            state.reported = (
                "0-" + body["new_version"].partition("-")[2] if fault == "old version" else body["new_version"]
            )
            return self.reply({"success": True})
        if path == "/reset_prefix_cache":
            return self.reply({"success": True})
        if path == "/abort_requests":
            if fault == "no aborts":
                return self.reply({"error": "busy"}, 500)
            with state.changed:
                for name in body["request_ids"]:
                    state.running.get(name, {})["aborted"] = True
                    state.log(aborted=name)
                state.changed.notify_all()
            return self.reply({"status": "aborted"})
        if path == "/pause":
            return self.pause(query["mode"])
        if path in ("/sleep", "/wake_up"):
            state.log(call=path.strip("/"), **query)
            state.free += (0 if fault == "insomnia" else 50) if path == "/sleep" else -25
            return self.reply({"status": "ok"})
        if path == "/resume":
            with state.changed:
                state.paused = False
                state.changed.notify_all()
            return self.reply({"status": "resumed"})
        if path == "/update_weights":
            return self.take(body["update_info"], fault)
        if path == "/finish_weight_update":
            state.version, lines = state.coming
            text = "\n".join(lines[name] for name in sorted(lines))
            state.checksum = hashlib.sha256(text.encode()).hexdigest()[:32]
            state.log(loaded=state.version)
            return self.reply({"message": "Weight update finished"})
        if path == "/collective_rpc":
            return self.collective(body, fault)
        if path == "/creditgraph/rows":
            return self.generate(body, fault)
        return self.reply({"error": "unknown path"}, 404)

    def pause(self, mode):
        state = self.state
        with state.changed:
            if mode == "abort":
                for request in state.running.values():
                    request["aborted"] = True
                state.changed.notify_all()
            state.paused = True
            state.changed.wait_for(lambda: not state.running)
        self.reply({"status": "paused"})

    def collective(self, body, fault):
        state = self.state
        method, arguments = body["method"], body.get("kwargs", {})
        if method == "creditgraph_install":
            state.installed = True
        if method == "creditgraph_update":
            if fault == "die in update":
                self.state.die()
            if fault == "hang in update":
                say("loading weights and going nowhere")
                time.sleep(3600)
            if fault == "500 in update":
                return self.reply({"error": "cannot load"}, 500)
            for file in map(Path, arguments["files"]):
                while not file.exists():
                    if (file.parent / "failed").exists():
                        return self.reply({"error": "no more files"}, 500)
                    time.sleep(0.001)
            state.version = arguments["version"]
            state.checksum = checksum_of(arguments["files"])
            state.log(loaded=state.version)
        if method == "creditgraph_free_bytes":
            return self.reply({"results": [str(state.free)]})  # as vLLM, which leaves dicts and lists alone
        if method == "creditgraph_begin":
            state.coming = (-1, {})
        return self.reply(
            {
                "results": [
                    {
                        "version": state.version,
                        "checksum": state.checksum,
                        "installed": state.installed,
                        "receives": fault != "no receiver",
                    }
                ]
            }
        )

    def take(self, part, fault):
        state = self.state
        if fault == "die in update":
            self.state.die()
        lines = state.coming[1] | lines_of(part["forms"], base64.b64decode(part["shared"]["bytes"]))
        state.coming = (part["version"], lines)
        state.log(took=len(part["forms"]))
        self.reply({"message": "Weights updated"})

    def generate(self, body, fault):
        state, sampling, name = self.state, body["sampling"], body["id"]
        body["token_ids"] = ids_of(body["tokens"])
        if "context" in body:
            state.log(scored=body["token_ids"])
            scored = [logprob_at(state.version, t) for t in body["token_ids"][body["context"] :]]
            return self.reply(columns(name, [], scored, 1.0, "length", [state.reported]))
        request: dict = {}
        with state.changed:
            state.changed.wait_for(lambda: not state.paused)
            state.running[name] = request
            version, reported = state.version, state.reported
            state.log(running=name)
        try:
            self.answer(body, sampling, request, fault, version, reported)
        finally:
            with state.changed:
                state.running.pop(name, None)
                state.changed.notify_all()

    def answer(self, body, sampling, request, fault, version, reported):
        state = self.state
        seconds = state.fault().get("seconds", state.options.seconds)
        with state.changed:
            state.changed.wait_for(lambda: request.get("aborted"), timeout=seconds)
        if body.get("stream") and fault not in ("500", "400"):
            return self.stream(body, request, fault, version, reported)
        if fault == "die in generation":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "500":
            return self.reply({"error": "the engine is dead"}, 500)
        if fault == "400":
            return self.reply({"error": {"message": "max_tokens is too large"}}, 400)
        if fault == "garbage":
            return self.reply(None, raw=b"<html>gateway</html>")
        if fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
            return None
        seed, count = sampling["seed"], sampling["max_tokens"]
        reason = "length"
        if request.get("aborted"):
            count, reason = count // 2, "abort"
        tokens = [token_at(seed, place) for place in range(count)]
        with state.changed:
            state.tokens += count
        state.log(prompt=body["token_ids"], seed=seed, version=version, reason=reason)
        return self.reply(self.part(body, tokens, reason, fault, version, reported))

    def part(self, body, tokens, reason, fault, version, reported):
        """`reason`: None for a part that is not the last."""
        if fault == "outside vocabulary":
            tokens = [VOCABULARY + 7, *tokens[1:]]
        logprobs = [logprob_at(version, t) for t in tokens]
        if fault == "few log-probs":
            logprobs = logprobs[: len(tokens) // 2]
        versions = [] if reason is None else ["77" if fault == "wrong version" else reported]
        whole = columns(body["id"], tokens, logprobs, 1.5, reason, versions)
        return {"id": body["id"]} if fault == "no completions" else whole

    def stream(self, body, request, fault, version, reported):
        """Server-sent events: the first token, then parts of the requested size, `part_seconds` apart."""
        state, sampling = self.state, body["sampling"]
        seed, count, size = sampling["seed"], sampling["max_tokens"], sampling["stream_interval"]
        pause = state.fault().get("part_seconds", 0.0)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

        def event(part):
            data = json.dumps(part) if fault != "garbage" else '{"gateway": "none"}'
            try:
                self.wfile.write(f"data: {data}\n\n".encode())
                self.wfile.flush()
            except OSError:
                request["aborted"] = True

        sent = 0
        while True:
            with state.changed:
                state.changed.wait_for(lambda: request.get("aborted"), timeout=pause if sent else 0.0)
            upto = sent if request.get("aborted") else min(count, sent + size if sent else 1)
            part = [token_at(seed, place) for place in range(sent, upto)]
            sent += len(part)
            with state.changed:
                state.tokens += len(part)
            reason = "abort" if request.get("aborted") else "length" if sent == count else None
            if fault == "cut" and sent > 1:
                return
            if fault == "die in generation" and sent > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            event(self.part(body, part, reason, fault, version, reported))
            if reason:
                state.log(prompt=body["token_ids"], seed=seed, version=version, reason=reason, sent=sent)
                return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--fault", default="")
    parser.add_argument("--record", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--startup", default="")
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    say("loading the model")
    if options.startup == "die once" and not Path(options.fault + ".died").exists():
        Path(options.fault + ".died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if options.startup == "fail":
        sys.exit("ValueError: no such quantisation")
    if options.startup == "hang":
        time.sleep(3600)
    if options.child:  # a worker of its own with shared memory, which outlives a killed server
        from multiprocessing.shared_memory import SharedMemory

        memory = SharedMemory(create=True, size=4096)
        say(f"memory {memory.name}")
        if os.fork() == 0:
            os.setpgid(0, 0)
            while True:
                time.sleep(1)
                memory.buf[0] = 1
    Handler.state = State(options)
    ThreadingHTTPServer.request_queue_size = 512
    ThreadingHTTPServer.daemon_threads = True
    try:
        server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    except OSError as error:
        sys.exit(f"[Errno {error.errno}] error while attempting to bind on address: address already in use")
    server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    say("serving")
    server.serve_forever()


if __name__ == "__main__":
    main()
