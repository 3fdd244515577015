"""One worker of `verifier.math`: reads and writes JSON lines. Of this project it imports only the comparison.

Request: {"number", "gold": text, "answer": text}. Reply: the number, and {"correct": bool, "text_only": bool} or
{"error": reason}. The first line out is {"ready": true}. Run as ``python -P math_worker.py MEMORY_GB SECONDS
CPU_SECONDS``: without -P this folder's math.py would hide the standard library's.

The first process imports math-verify once and then only watches a copy of itself (a fork) that responds. Two kernel
timers, of wall-clock and of processor time, end the copy where Python code cannot be interrupted. The next copy costs
milliseconds instead of another import.
"""

import contextlib
import gc
import json
import mmap
import os
import resource
import signal
import sys
from pathlib import Path

# One expression per form of answers: parsing the first one of a form takes up to a second, later ones take
# milliseconds.
_WARM = [
    "\\frac{1}{2}x", "(x+1)(x-2)", "x^2-3x+2", "x^{3}+2x^{2}-5", "2\\sqrt{3}", "\\sqrt{x+1}+2", "\\frac{\\sqrt{3}}{2}",
    "\\frac{3\\pi}{4}", "2\\pi", "\\sin(x)", "\\cos\\frac{\\pi}{6}", "\\ln 2", "\\log_{2} 8", "e^{2x}", "3+4i",
    "\\frac{a+b}{c-d}", "n(n+1)/2", "2^{n}-1", "\\binom{n}{2}", "n!", "\\{1,2\\}", "(-\\infty,1)\\cup(3,\\infty)",
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "|x-1|", "\\frac{x^2-1}{x+1}", "-\\frac{a}{b}", "1+\\sqrt{5}", "x>2",
]  # fmt: skip


def main() -> None:
    """Serves requests until standard input ends."""
    limit = int(float(sys.argv[1]) * 2**30)
    if sys.platform != "darwin":  # macOS has no limit of memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = float(sys.argv[2])
    cpu_seconds = float(sys.argv[3])
    # Replies keep their own descriptor, so that a library's print cannot garble them.
    replies = os.dup(1)
    os.dup2(2, 1)
    import logging

    logging.disable(logging.CRITICAL)
    sys.path.append(str(Path(__file__).absolute().parents[3]))
    from creditgraph.components.verifier.math_equal import compare

    for gold in _WARM:
        with contextlib.suppress(Exception):
            compare(gold, f"{gold}+1")
    gc.freeze()
    _send(replies, {"ready": True})
    at_work = mmap.mmap(-1, 8)  # number of the request that the copy works at; 0 between requests
    while True:
        child = os.fork()
        if child == 0:
            _serve(replies, seconds, cpu_seconds, at_work)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return
        reasons = {
            int(signal.SIGALRM): f"timed out after {seconds:g} s",
            int(signal.SIGPROF): f"took more than {cpu_seconds:g} s of computing",
        }
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number := int.from_bytes(at_work[:], "little"):
            _send(replies, {"number": number, "error": reasons.get(ended, f"the worker ended with status {status}")})
        at_work[:] = bytes(8)


def _serve(replies: int, seconds: float, cpu_seconds: float, at_work: mmap.mmap) -> None:
    """The copy's loop. Its timers are off before a reply leaves, so every request has exactly one reply."""
    from creditgraph.components.verifier.math_equal import compare

    with contextlib.suppress(AttributeError, OSError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive a parent that was killed
    for line in sys.stdin:
        request = json.loads(line)
        at_work[:] = request["number"].to_bytes(8, "little")
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            correct, text_only = compare(request["gold"], request["answer"])
            reply: dict[str, object] = {"correct": correct, "text_only": text_only}
        except MemoryError:
            reply = {"error": "MemoryError"}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        at_work[:] = bytes(8)
        _send(replies, {"number": request["number"], **reply})
    os._exit(0)


def _send(fd: int, reply: dict[str, object]) -> None:
    os.write(fd, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
