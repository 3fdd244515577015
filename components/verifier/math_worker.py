"""One worker process of `verifier.math`: JSON lines in, JSON lines out. Imports neither torch nor this project.

Request: {"gold": text, "answer": text}. Reply: {"correct": bool} or {"error": reason}. The first line out is {"ready": true}.
Run as ``python -P math_worker.py MEMORY_GB SECONDS``: without -P this folder's math.py would hide the standard library's.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys


def main() -> None:
    """Answers requests until standard input ends."""
    limit = int(float(sys.argv[1]) * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    seconds = float(sys.argv[2])
    # Replies keep their own descriptor, so that a library's print cannot garble them.
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    import logging

    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        request = json.loads(line)
        # The parent enforces the limit; the alarm ends a worker whose parent was killed while it hung.
        signal.setitimer(signal.ITIMER_REAL, seconds + 5)
        try:
            gold = parse(f"\\boxed{{{request['gold']}}}", parsing_timeout=None, raise_on_error=True)
            if not gold:
                reply: dict[str, object] = {"error": f"the reference answer '{request['gold'][:60]}' cannot be read"}
            else:
                # An answer that cannot be read is wrong, not invalid: nonsense must not escape its penalty.
                answer = parse(f"\\boxed{{{request['answer']}}}", parsing_timeout=None)
                reply = {"correct": bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
