"""Calls of a user's methods, plain or async, many at a time, each with a time limit."""

import asyncio
import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NoReply
from dataclasses import dataclass
from typing import Any

from creditgraph.pipeline.core.errors import raised_text

_GRACE = 5.0  # seconds beyond all limits after which the event loop itself is taken to be blocked


@dataclass(frozen=True)
class Fault:
    """Why a call gave nothing of use: a kind, one word, and a sentence."""

    kind: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class TimedCalls:
    """Runs calls, of several threads if need be; one that hangs or raises costs only its own result.

    A plain method runs in a thread, an async one on an event loop that lives as long as this object. Nothing can end a
    thread: one that hangs is left behind, as a daemon that does not keep the process alive.

    Args:
        seconds: limit of wall time per call.
        at_once: number of calls that run at a time, of all threads together.
    """

    def __init__(self, seconds: float, at_once: int) -> None:
        self._seconds = seconds
        self._at_once = at_once
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gates: dict[int, asyncio.Semaphore] = {}  # of the loop, by the number of calls that they let through
        self._lock = threading.Lock()
        self._unanswered = 0

    def run(self, calls: Sequence[Callable[[], Any]], at_once: int | None = None) -> list[Any]:
        """What each call returned, or a `Fault` of kind "time" or "raised", in order; fewer `at_once` if given."""
        at_once = min(at_once or self._at_once, self._at_once)
        results: list[Any] = [Fault("time", "the event loop was blocked by an async method that does not await")] * len(
            calls
        )
        with self._lock:
            loop = self._running()
            gate = self._gates.setdefault(at_once, asyncio.Semaphore(at_once))
            self._unanswered += len(calls)
            limit = math.ceil(self._unanswered / at_once) * self._seconds + _GRACE
        waiting = asyncio.run_coroutine_threadsafe(self._all(calls, results, gate), loop)
        try:
            waiting.result(limit)
        except NoReply:
            with self._lock:
                if self._loop is loop:
                    self._loop = None  # its thread is left behind, as that of a plain method would be
        finally:
            with self._lock:
                self._unanswered -= len(calls)
        return results

    def close(self) -> None:
        """Ends the event loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._gates = {}
            threading.Thread(target=self._loop.run_forever, daemon=True, name="environments").start()
        return self._loop

    async def _all(self, calls: Sequence[Callable[[], Any]], results: list[Any], gate: asyncio.Semaphore) -> None:
        async def one(place: int) -> None:
            async with gate:
                try:
                    results[place] = await asyncio.wait_for(_result(calls[place]), self._seconds)
                except TimeoutError:
                    results[place] = Fault("time", f"no reply in {self._seconds:g} s")

        await asyncio.gather(*(one(place) for place in range(len(calls))))


async def _result(call: Callable[[], Any]) -> Any:
    try:
        value = call() if _is_async(call) else await _in_thread(call)
        return await value if inspect.isawaitable(value) else value
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # by the time limit, not by the call
        return Fault("raised", "CancelledError")
    except BaseException as error:
        return Fault("raised", raised_text(error))


def _is_async(call: Any) -> bool:
    return inspect.iscoroutinefunction(getattr(call, "func", call))


async def _in_thread(call: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any) -> None:
        if not future.done():  # cancelled by the time limit
            future.set_result(value)

    def work() -> None:
        try:
            value = call()
        except BaseException as error:
            value = Fault("raised", raised_text(error))
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value)

    threading.Thread(target=work, daemon=True).start()
    return await future
