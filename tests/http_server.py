"""An HTTP server for tests: one function answers every request."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(answer):
    """A server on a free port, until the end of the block.

    `answer(how, path, body)` returns status and text; it runs in a thread per request. `how` is the next entry of
    `server.script`, "answer" after its end. `server.requests` collects (path, body, header Authorization).
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            with lock:
                server.requests.append((self.path, body, self.headers.get("Authorization")))
                how = server.script.pop(0) if server.script else "answer"
            status, text = answer(how, self.path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            try:
                self.wfile.write(text.encode())
            except OSError:  # who asked has left
                return

        do_GET = do_POST

        def log_message(self, *_):
            pass

    lock = threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.script = [], []
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
