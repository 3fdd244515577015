"""Run directories made by hand, with every kind of record, and one real run."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import (
    Credit,
    Payload,
    Prompts,
    Rewards,
    Segments,
    SegmentValues,
    StepErrors,
    TokenLogprobs,
    Trajectories,
    Turns,
)
from creditgraph.pipeline.run.compose.experiment import compose
from creditgraph.pipeline.run.recording import write_payload


def put(run: Path, output: str, iteration: int, payload: Payload) -> Path:
    file = run / "record" / output / f"{iteration:06d}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_payload(file, payload)
    return file


def trajectories(uid: list[int], rows: list[list[int]], **changes: Any) -> Trajectories:
    tokens, count = Jagged.from_rows(rows, torch.int32), len(uid)
    values: dict[str, Any] = {
        "uid": torch.tensor(uid),
        "prompt_uid": torch.full((count,), 1000),
        "group": torch.zeros(count, dtype=torch.int64),
        "parent": torch.full((count,), -1),
        "prompt_tokens": Jagged.from_rows([[3, 4]] * count, torch.int32),
        "response_tokens": tokens,
        "inherited": torch.zeros(count, dtype=torch.int64),
        "engine_logprobs": tokens.with_values(-0.1 * tokens.positions.float()),
        "entropies": tokens.with_values(0.5 * torch.ones(len(tokens.values))),
        "thought_ends": Jagged.from_rows([[2, len(row)] if len(row) > 2 else [] for row in rows], torch.int32),
        "policy_version": torch.zeros(count, dtype=torch.int64),
        "finish_reason": ["final"] * count,
        "text": [f"text {u}" for u in uid],
    }
    return Trajectories(**values | changes)


def config_of(root: Path, name: str, *overrides: str) -> dict[str, Any]:
    return compose([f"run.root={root}", f"run.name={name}", *overrides])


Maker = Callable[..., Path]
SECOND = 1_000_000  # microseconds


def put_trace(run: Path, rank: int = 0, iterations: int = 2, node: str = "sampler", more: str = "") -> Path:
    """A trace by hand. Per iteration of 3 s: a node of 2 s with a part of 1 s, a wait of 0.5 s; a learner beside it."""
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "ts": 0, "tid": i + 1, "args": {"name": n}}
        for i, n in enumerate(("main", "generation"))
    ]
    for i in range(iterations):
        at = 1_700_000_000 * SECOND + 3 * i * SECOND
        rows = [
            ("generate", "generation", 0.5, 1.0, 2),
            (node, "generation", 0.0, 2.0, 2),
            ("other ranks", "waiting", 2.0, 0.5, 2),
            ("learner", "learning", 1.5, 1.5, 1),
        ]
        events += [
            {
                "name": name,
                "cat": phase,
                "ph": "X",
                "ts": at + int(begin * SECOND),
                "dur": int(seconds * SECOND),
                "tid": tid,
                "args": {"iteration": i, "attempt": 1},
            }
            for name, phase, begin, seconds, tid in rows
        ]
    file = run / "traces" / f"rank-{rank}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text("[\n" + ",\n".join(json.dumps({**e, "pid": rank}) for e in events) + more, encoding="utf-8")
    return file


def maker(root: Path) -> Maker:
    """Writes runs/<name>: 2 iterations of 3 base chains (one failed) and a suffix, with everything recorded."""

    def make(
        name: str = "r",
        *overrides: str,
        iterations: int = 2,
        details: list[str] | None = None,
        records: bool = True,
        trace: str = "",
    ) -> Path:
        run = root / "runs" / name
        run.mkdir(parents=True)
        config = config_of(root / "runs", name, *(overrides or ("recipe=toy_srpo",)))
        (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        rows = [
            {
                "iteration": i,
                "rewards/mean": 0.1 * i,
                "engine/sampled_tokens": 100.0,
                "seconds/iteration": 2.0,
                "seconds/sampler": 1.5,
            }
            for i in range(iterations)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        (run / "record").mkdir()
        for i in range(iterations if records else 0):
            fill(run, i, details or ["", "answered '3'", "answered '4'"])
        if trace:
            put_trace(run, node=trace)
        return run

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    """Writes runs by hand; see `maker`."""
    return maker(tmp_path)


@pytest.fixture(scope="session")
def make_run_once(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """The same, for runs that several tests read."""
    return maker(tmp_path_factory.mktemp("by_hand"))


def fill(run: Path, i: int, details: list[str]) -> None:
    base = 10 * (i + 1)
    chains = trajectories([base, base + 1], [[5, 6, 7, 8], [5, 6, 9]])
    failures = trajectories([base + 2], [[5, 6, 10, 11]])
    suffix = trajectories([base + 3], [[5, 6, 12]], parent=torch.tensor([base + 2]), inherited=torch.tensor([2]))
    pool = Trajectories.concat([chains, suffix])
    tokens = pool.response_tokens
    put(
        run,
        "prompts.batch",
        i,
        Prompts(
            uid=torch.tensor([1000]),
            tokens=Jagged.from_rows([[3, 4]], torch.int32),
            text=["p"],
            answer=["9"],
            metadata=[{"task": "chains"}],
        ),
    )
    put(run, "sampler.trajectories", i, chains)
    put(run, "sampler.failures", i, failures)
    put(run, "expander.trajectories", i, suffix)
    put(run, "buffer.trajectories", i, pool)
    put(run, "localizer.errors", i, StepErrors(uid=failures.uid, step=torch.tensor([2]), source=["boxed"]))
    correct = torch.tensor([True, False, False])
    put(
        run,
        "rewards.rewards",
        i,
        Rewards(
            uid=pool.uid, value=correct.float(), correct=correct, valid=torch.ones(3, dtype=torch.bool), detail=details
        ),
    )
    # Row 0: +1 on every token; row 1: −0.5; row 2: −2 on its own token.
    mask = tokens.with_values(tokens.positions >= tokens.spread(pool.inherited).values)
    advantage = tokens.spread(torch.tensor([1.0, -0.5, -2.0]))
    credit = Credit(
        uid=pool.uid,
        advantage=advantage,
        mask=mask,
        columns={"logprobs": pool.engine_logprobs.with_values(pool.engine_logprobs.values + 0.25)},
    )
    put(run, "advantage.credit", i, credit)
    # The learner's own log-probs: 0.5 above the engine's, none of row 1.
    own = torch.where(tokens.row_ids == 1, torch.nan, pool.engine_logprobs.values + 0.5)
    put(run, "learner.logprobs", i, TokenLogprobs(uid=pool.uid, logprobs=tokens.with_values(own)))
    put(run, "segmenter.segments", i, Segments(uid=pool.uid, ends=Jagged.from_rows([[2, 4], [2, 3], [3]], torch.int32)))
    put(
        run,
        "value.values",
        i,
        SegmentValues(
            uid=pool.uid, values=Jagged.from_rows([[0.2, 0.6, 1.0], [0.2, 0.1, 0.0], [0.3, 0.0]], torch.float32)
        ),
    )


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished toy_rredcot run of two iterations, everything recorded."""
    root = tmp_path_factory.mktemp("real")
    small = [
        "prompts.batch=4",
        "evaluator.num_problems=4",
        "evaluator.every=0",
        "data.train.size=50",
        "data.eval.size=10",
    ]
    settings = [
        "run.iterations=2",
        "run.record.every=1",
        "run.checkpoint.every=1",
        "run.checkpoint.keep=9",
        "run.device=cpu",
    ]
    assert main(["train", "recipe=toy_rredcot", f"run.root={root}", "run.name=real", *small, *settings]) == 0
    return root / "real"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; tests that need it are skipped where it is not installed.

    Ended with its module: while it is open, its event loop runs in this thread, where asyncio.run then refuses to.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright axe-core-python")
    chromium_path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not chromium_path:
        pytest.skip("no Chromium: apt-get install -y chromium")
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=chromium_path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


class Tab:
    """A page with what it said on the console."""

    def __init__(self, browser: Any, file: Path, width: int, scheme: str) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)


@pytest.fixture
def open_tab(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens an HTML text as a page."""
    tabs: list[Tab] = []

    def open_(html: str, width: int = 1600, scheme: str = "light") -> Tab:
        file = tmp_path / f"page{len(tabs)}.html"
        file.write_text(html, encoding="utf-8")
        tabs.append(Tab(browser, file, width, scheme))
        return tabs[-1]

    yield open_
    for tab in tabs:
        tab.context.close()


@pytest.fixture
def put_turns() -> Callable[[Path, int], None]:
    """Adds an episode of two turns to an iteration (both chains), and one of a single turn, a fault (the suffix)."""

    def add(run: Path, i: int) -> None:
        base = 10 * (i + 1)
        uid = torch.tensor([base, base + 1, base + 3])
        turns = Turns(
            uid=uid,
            episode=uid[[0, 0, 2]],
            turn=torch.tensor([0, 1, 0]),
            state=["start", "later", ""],
            reward=torch.tensor([0.25, 0.5, 0.0]),
            done=torch.tensor([False, True, False]),
            fault=["", "", "raised: KeyError"],
        )
        put(run, "sampler.turns", i, turns)

    return add
