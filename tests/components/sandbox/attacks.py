"""The attacks of attacks.txt, run in the sandbox; needs only the standard library, so that any user can run it.

python tests/components/sandbox/attacks.py [--every N]      # a table of figures as JSON; exit code 1 if one succeeds
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from creditgraph.components.sandbox.limits import Limits
from creditgraph.components.sandbox.pool import Program, run_programs
from creditgraph.components.sandbox.probe import find_isolation
from creditgraph.components.text.code_tests import CodeTest, mismatch

WORKERS = 8  # attacks mostly wait for their time limit
LIMITS = Limits(seconds=1.0, memory_mb=192, processes=12, files_mb=8, output_kb=256)
HONEST = "print(int(input()) ** 2)"


@dataclasses.dataclass(frozen=True)
class Attack:
    """A program, and the regular expression for the reason with which it must be wrong; a name of "" is no attack."""

    name: str
    reason: str
    source: str

    def program(self, host):
        source = self.source
        for old, new in host.items():
            source = source.replace(old, new)
        if self.name.startswith("[function]"):
            return Program(source=source, inputs=[[7]], function="solve")
        return Program(source=source, inputs=["0\n", "7\n"] if self.name.startswith("[later]") else ["7\n"])

    def detail(self, program, results):
        """Why the program is wrong, "" if it is right: that is, if the attack succeeded."""
        last = results[-1]
        test = CodeTest(input=program.inputs[-1], output=49 if program.function else "49\n")
        return last.reason or mismatch(test, program.function, last.out, last.result, 0.0)


def read_attacks():
    text = (Path(__file__).parent / "attacks.txt").read_text()
    parts = (part.partition("\n") for part in text.split("\n=== ")[1:])
    return [Attack(*heading.split(" :: ", 1), body) for heading, _, body in parts]


@contextlib.contextmanager
def host_of_canaries():
    """What the attacks are after; yields (what to put into the programs, a process that must survive)."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "secret").write_text("canary")
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(folder / "socket"))
        unix.listen()
        abstract.bind(f"\0creditgraph-canary-{os.getpid()}")
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        stack.callback(victim.kill)
        os.environ["CREDITGRAPH_CANARY"] = "canary"
        stack.callback(os.environ.pop, "CREDITGRAPH_CANARY")
        yield (
            {
                "@FILE@": str(folder / "secret"),
                "@PORT@": str(tcp.getsockname()[1]),
                "@SOCKET@": str(folder / "socket"),
                "@VICTIM@": str(victim.pid),
                "@PARENT@": str(os.getpid()),
                "@ABSTRACT@": f"creditgraph-canary-{os.getpid()}",
            },
            victim,
        )


def run_attacks(attacks, host, isolation):
    """Runs all in one batch, an honest program after every fourth: ([(attack, detail)], seconds, number run twice)."""
    batch = []
    for number, attack in enumerate(attacks):
        batch.append(attack)
        if number % 4 == 3:
            batch.append(Attack("", "^$", f"{HONEST}  # {number}"))
    programs = [attack.program(host) for attack in batch]
    started = time.monotonic()
    results = run_programs(programs, isolation, LIMITS, WORKERS)
    seconds = time.monotonic() - started
    details = [attack.detail(*pair) for attack, *pair in zip(batch, programs, results, strict=True)]
    # On a busy host a program may reach the limit before its attack fails; those get more time.
    slow = [
        i for i, attack in enumerate(batch) if "timed out" in details[i] and not re.search(attack.reason, details[i])
    ]
    patient = dataclasses.replace(LIMITS, seconds=20.0)
    again = run_programs([programs[i] for i in slow], isolation, patient, 2)
    for i, result in zip(slow, again, strict=True):
        details[i] = batch[i].detail(programs[i], result)
    return list(zip(batch, details, strict=True)), seconds, len(slow)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="run only every N-th attack")
    attacks = read_attacks()[:: parser.parse_args().every]
    isolation = find_isolation()
    with host_of_canaries() as (host, victim):
        outcomes, seconds, _ = run_attacks(attacks, host, isolation)
        alive = victim.poll() is None
    tried = [(attack, detail) for attack, detail in outcomes if attack.name]
    honest = [detail for attack, detail in outcomes if not attack.name]
    figures = {
        "user": os.geteuid(),
        "user_namespace": isolation.user_namespace,
        "tried": len(tried),
        "held": sum(detail != "" for _, detail in tried),
        "other_reason": {a.name: detail for a, detail in tried if detail and not re.search(a.reason, detail)},
        "succeeded": [attack.name for attack, detail in tried if not detail],
        "honest": len(honest),
        "honest_right": honest.count(""),
        "victim_alive": alive,
        "seconds": round(seconds, 1),
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    return int(figures["held"] < len(tried) or figures["honest_right"] < len(honest) or not alive)


if __name__ == "__main__":
    sys.exit(main())
