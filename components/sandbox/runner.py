"""The runner inside the sandbox: runs one program, once per test, without access to the expected outputs.

Standard input brings JSON lines: the job, then for each test its input, and null to end a running test. The next input
comes when the result before it has left, so no test can read it earlier. Standard output takes JSON lines:
{"ready": true}, then for each test {"status": "exit" | "signal" | "timeout" | "output", "code": int, "out": text,
"err": last line, "result": text}. Each test is a fork of this process, so the interpreter starts once per program.
After it, the processes it left running are killed and its files deleted. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing would cost a fifth of the start
    import io
    from typing import Any, NoReturn

CHUNK = 1 << 16


def main() -> None:
    """Runs one job."""
    requests = _Requests(os.dup(0))
    job = json.loads(requests.line())
    if job["processes"]:
        _limit(resource.RLIMIT_NPROC, job["processes"])
    _limit(resource.RLIMIT_CORE, 0)
    if job["uid"]:
        # Root is exempt from the limit of processes, and no limit of one program may touch another: each has a user id
        # of its own.
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    results = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    _send(results, {"ready": True})
    while line := requests.line():
        test_input = json.loads(line)
        if test_input is not None:  # the end of a test that has ended by itself
            _send(results, _run(job, test_input, requests, wake_read))


class _Requests:
    """The lines on a descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.unread = bytearray()
        self.closed = False

    def line(self) -> bytes:
        """The next line, b"" after the last one."""
        end = self.unread.find(b"\n")
        while end < 0 and not self.closed:
            start = len(self.unread)
            self.receive()
            end = self.unread.find(b"\n", start)
        line = bytes(self.unread[: end + 1])
        del self.unread[: end + 1]
        return line

    def receive(self) -> None:
        """Waits for more."""
        chunk = os.read(self.fd, 1 << 20)
        self.unread += chunk
        self.closed = not chunk


def _send(results: io.BufferedWriter, reply: dict[str, Any]) -> None:
    results.write(json.dumps(reply).encode() + b"\n")
    results.flush()


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(kind, (value, value))
    except ValueError:
        if sys.platform != "darwin":  # macOS has no limit of memory, and none of the stack can be set from Python
            raise


class _Test:
    """The parent's side of one running test: `ends` are its ends of standard input, output, error and the value."""

    def __init__(self, job: dict[str, Any], pid: int, ends: list[int], data: bytes) -> None:
        self.job = job
        self.pid = pid
        self.stdin, self.out, self.err, self.value = ends
        self.unsent = memoryview(data)
        self.received = {fd: bytearray() for fd in ends[1:]}
        self.open = set(self.received)
        self.status: tuple[str, int] | None = None
        self.reaped = False

    def watch(self, wake: int, requests: _Requests) -> None:
        """Feeds and drains the test until it ends, or has to. `wake` becomes readable when a child has ended."""
        self._close_stdin_when_sent()
        while self.status is None:
            # While a test runs, the only request is to end it.
            if requests.unread or requests.closed:
                self.status = ("timeout", 0)
                return
            writable = [self.stdin] if self.stdin >= 0 else []
            readable, writable, _ = select.select([wake, requests.fd, *self.open], writable, [])
            if requests.fd in readable:
                requests.receive()
                continue  # what came meanwhile is too late: the test may have stopped this process
            for fd in self.open.intersection(readable):
                self._read(fd)
            if writable:
                self._write()
            if wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 512)
                self._reap()

    def end(self) -> None:
        """Reaps the test's process and closes its pipes."""
        if not self.reaped:
            os.waitpid(self.pid, 0)
        for fd in self.received:
            os.close(fd)
        if self.stdin >= 0:
            os.close(self.stdin)

    def reply(self) -> dict[str, Any]:
        """The reply to the host; the output of a test counts only if it ended normally."""
        status, code = self.status or ("timeout", 0)
        usable = (status, code) == ("exit", 0)
        return {
            "status": status,
            "code": code,
            "out": _text(self.received[self.out]) if usable and not self.job["function"] else "",
            "err": _last_line(self.received[self.err]),
            "result": _text(self.received[self.value]) if usable else "",
        }

    def _read(self, fd: int) -> bool:
        """One chunk; False when there is none."""
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.open.discard(fd)
            return False
        self.received[fd] += chunk
        if sum(map(len, self.received.values())) > self.job["output"]:
            self.status = self.status or ("output", 0)
            return False
        return True

    def _write(self) -> None:
        """Writes as much of the standard input as the test's pipe accepts."""
        try:
            sent = os.write(self.stdin, self.unsent[:CHUNK])
            self.unsent = self.unsent[sent:]
        except BlockingIOError:
            return
        except OSError:  # it closed its standard input
            self.unsent = memoryview(b"")
        self._close_stdin_when_sent()

    def _close_stdin_when_sent(self) -> None:
        if not self.unsent:
            os.close(self.stdin)
            self.stdin = -1

    def _reap(self) -> None:
        pid, code = os.waitpid(self.pid, os.WNOHANG)
        if not pid:  # another child ended, which the test left to this process
            return
        self.reaped = True
        for fd in list(self.open):  # what it wrote before it ended; others may hold the pipe open for ever
            while self._read(fd):
                pass
        ended = ("signal", os.WTERMSIG(code)) if os.WIFSIGNALED(code) else ("exit", os.WEXITSTATUS(code))
        self.status = self.status or ended


def _run(job: dict[str, Any], test_input: Any, requests: _Requests, wake: int) -> dict[str, Any]:
    pipes = [os.pipe() for _ in range(4)]  # standard input, output and error; the value a function returns
    theirs = [pipes[0][0], *(write for _, write in pipes[1:])]
    ours = [pipes[0][1], *(read for read, _ in pipes[1:])]
    try:
        pid = os.fork()
    except OSError as error:
        for fd in theirs + ours:
            os.close(fd)
        return {"status": "signal", "code": 0, "out": "", "err": str(error), "result": ""}
    if pid == 0:
        _child(job, test_input, theirs)
    for fd in theirs:
        os.close(fd)
    for fd in ours:
        os.set_blocking(fd, False)
    test = _Test(job, pid, ours, b"" if job["function"] else test_input.encode("utf-8", "replace"))
    test.watch(wake, requests)
    isolated = job["isolated"] and os.getpid() < 10
    _kill_rest(isolated, pid)
    test.end()
    if isolated:
        _wait_for_rest()
        _empty(b"/tmp")
    return test.reply()


def _kill_rest(isolated: bool, pid: int) -> None:
    """Kills what the test started: its session, or in a process namespace all but this process and the init."""
    try:
        # Process 1 is bubblewrap's init, this one comes right after it. A higher number is no such namespace, and −1
        # would be everything on the host.
        if isolated:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _wait_for_rest() -> None:
    """Waits until all other processes of the namespace are gone: none may see the next test."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(-1, signal.SIGKILL)
            time.sleep(0.001)


def _empty(folder: bytes) -> None:
    """Deletes all files of a test. What is in a folder inside moves up first, so that no path grows long."""
    with contextlib.suppress(PermissionError):  # in a user namespace the program owns it: mode and time tell nothing
        os.chmod(folder, 0o1777)
        os.utime(folder, (0, 0))
    new = folder + b"/" + os.urandom(16).hex().encode()
    count = 0
    while names := os.listdir(folder):
        for name in names:
            path = folder + b"/" + name
            if _unlinked(path):
                continue
            for inside in os.listdir(path):
                if not _unlinked(path + b"/" + inside):
                    os.rename(path + b"/" + inside, new + b"%d" % count)
                    count += 1
            os.rmdir(path)


def _unlinked(path: bytes) -> bool:
    """Deletes a file; a folder it opens instead, and returns False."""
    try:
        os.unlink(path)
        return True
    except IsADirectoryError:
        os.chmod(path, 0o700)
        return False


def _text(data: bytearray) -> str:
    return data.decode("utf-8", "replace")


def _last_line(err: bytearray) -> str:
    lines = [line for line in _text(err[-4000:]).splitlines() if line.strip()]
    return lines[-1].strip().removesuffix(":")[:200] if lines else ""


def _child(job: dict[str, Any], test_input: Any, ends: list[int]) -> NoReturn:
    """The test's process: limits, descriptors, then the program. Never returns."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, fd in enumerate(ends):
            os.dup2(fd, target + 100)
        for target in range(4):
            os.dup2(target + 100, target)
        os.closerange(4, 1024)
        _limit(resource.RLIMIT_NOFILE, job["open_files"])
        _limit(resource.RLIMIT_FSIZE, job["files"])
        _limit(resource.RLIMIT_CPU, job["cpu_seconds"])
        _limit(resource.RLIMIT_STACK, job["stack"])
        _limit(resource.RLIMIT_AS, job["memory"])
        code = _execute(job, test_input)
    except BaseException as error:
        code = _report(error)
    finally:
        os._exit(code)


def _execute(job: dict[str, Any], test_input: Any) -> int:
    import _sitebuiltins
    import atexit
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    sys.set_int_max_str_digits(job["digits"])
    sys.path[:] = [p for p in sys.path if p and not p.startswith("/sandbox")] + job["packages"]
    sys.argv = ["program.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        # As in the interpreter: threads that are no daemons are waited for, then the exit functions run.
        try:
            exec(compile(job["source"], "program.py", "exec"), module.__dict__)
            if job["function"]:
                _call(module, job["function"], test_input)
        finally:
            if "threading" in sys.modules:
                sys.modules["threading"]._shutdown()
            atexit._run_exitfuncs()
        sys.stdout.flush()
    except SystemExit as stop:
        sys.stdout.flush()
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 255
        sys.stderr.write(f"{stop.code}\n")
        sys.stderr.flush()
        return 1
    return 0


def _call(module: types.ModuleType, name: str, arguments: list[Any]) -> None:
    """Calls Solution().name or name, and writes the value it returns as JSON to descriptor 3."""
    solution = getattr(module, "Solution", None)
    function = getattr(solution(), name, None) if solution is not None else None
    if function is None:
        function = getattr(module, name, None)
    if function is None:
        raise NameError(f"no function '{name}' in the program")
    data = memoryview(json.dumps(function(*arguments)).encode())
    while data:
        data = data[os.write(3, data) :]


def _report(error: BaseException) -> int:
    with contextlib.suppress(BaseException):  # the program may have closed or replaced it
        sys.stdout.flush()
    try:
        # Not traceback: importing it takes descriptors and memory that the program may have used up.
        lines = f"{type(error).__name__}: {error}".split("\n")
        os.write(2, ("\n" + " ".join(lines)[:2000]).encode("utf-8", "replace"))
    except BaseException:
        os.write(2, f"\n{type(error).__name__}".encode("utf-8", "replace"))
    return 1


if __name__ == "__main__":
    main()
