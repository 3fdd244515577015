"""The served report: its key, its host, and a page that follows the runs."""

import threading
from html import unescape
from http.client import HTTPConnection

import pytest

from creditgraph.pipeline.app.report.live import MOST_RUNS, LivePage, Server, newest
from creditgraph.pipeline.core.errors import RunError


@pytest.fixture
def served(make_run):
    """(server, run)."""
    run = make_run("one")
    with Server(LivePage([run.parent])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server, run
        server.shutdown()
        thread.join()


def get(server, path, host=None):
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers={"Host": host} if host else {})
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def test_the_page_is_below_its_key_and_asks_its_own_server_alone(served):
    server, _run = served
    code, page = get(server, f"/{server.key}/")
    assert code == 200
    assert "connect-src 'self'" in unescape(page)
    assert f'data-state="{server.page.state()}"' in page
    assert len(server.key) >= 20


@pytest.mark.parametrize(
    ("path", "host"),
    [("/", None), ("/x/", None), ("/KEY/../etc/passwd", None), ("/KEY/", "evil.example:80"), ("/KEY/state", "evil:1")],
)
def test_other_requests_get_404(served, path, host):
    server, _run = served
    code, text = get(server, path.replace("KEY", server.key), host)
    assert code == 404
    assert "Rollouts" not in text


def test_the_state_changes_with_the_metrics_and_the_page_with_it(served):
    server, run = served
    before = get(server, f"/{server.key}/state")
    assert get(server, f"/{server.key}/state") == before
    page = get(server, f"/{server.key}/")[1]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 7, "rewards/mean": 0.5, "seconds/iteration": 1.0}\n')
    assert get(server, f"/{server.key}/state") != before
    assert get(server, f"/{server.key}/")[1] != page


def test_a_port_in_use_is_one_sentence(served):
    server, run = served
    with pytest.raises(RunError, match=f"--port {server.server_port}: .*choose another port"):
        Server(LivePage([run.parent]), server.server_port)


def test_the_newest_runs_are_shown(tmp_path):
    import os

    for i in range(MOST_RUNS + 2):
        run = tmp_path / f"r{i}"
        run.mkdir()
        (run / "metrics.jsonl").touch()
        os.utime(run / "metrics.jsonl", (i, i))
    assert [path.name for path in newest([tmp_path])] == [f"r{i}" for i in range(2, MOST_RUNS + 2)]
