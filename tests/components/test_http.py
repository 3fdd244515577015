"""Requests in flight when the client closes, or the process is interrupted."""

import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from creditgraph.components.http import Client, Server, ServerSettings


@pytest.fixture
def silent():
    """The address of a server that takes connections and never answers, an event set when a request has come, and the
    connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        came = threading.Event()
        kept = []

        def accept():
            while True:
                try:
                    kept.append(server.accept()[0])
                except OSError:  # closed
                    return
                kept[-1].recv(1)
                came.set()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", came, kept
        for connection in kept:
            connection.close()


def test_a_thread_that_waits_for_a_reply_goes_on_when_the_client_closes(silent):
    url, came, _ = silent
    client = Client("a test", {})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, url, {}, seconds=600, retries=3)
        assert came.wait(30)
        client.close()
        assert asked.result(30) == (None, f"{url}: the connections were closed before its reply")
    assert client.post(url, {}, seconds=600) == (None, f"{url}: the connections were closed before its reply")
    client.close()  # again: nothing


def test_a_thread_that_waits_for_its_next_try_goes_on_too(silent, monkeypatch):
    url, came, connections = silent
    client = Client("a test", {})
    waits, wait = threading.Event(), client._closed.wait
    monkeypatch.setattr(client._closed, "wait", lambda seconds: waits.set() or wait(seconds))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, url, {}, seconds=600, retries=1, wait=600)
        assert came.wait(30)
        connections[0].close()
        assert waits.wait(30)
        client.close()
        assert asked.result(30) == (None, f"{url}: the connections were closed before its reply")


def test_an_interrupt_does_not_wait_for_replies(silent):
    url, came, _ = silent
    server = Server(url, ServerSettings(seconds=5, retries=0))

    def interrupt():
        came.wait(30)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            server.results([1])
    finally:
        signal.signal(signal.SIGINT, before)
    assert server.results([1]) == [(None, f"{url}: the connections were closed before its reply")]
