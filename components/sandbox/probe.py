"""A program that tries to leave the sandbox in the plainest ways, run once before anything else is."""

from __future__ import annotations

import json

from components.sandbox.isolation import Isolation
from components.sandbox.limits import Limits
from components.sandbox.pool import Program, Test, run_programs

# Each line it prints names something that must not be possible.
PROBE = """
import json, os, socket
found = []
if os.getpid() > 20:
    found.append("it sees the host's processes")
if os.geteuid() == 0:
    found.append("it runs as root")
for place in ("/", "/usr/lib", "/dev", "/dev/shm", "/etc", "/home", "/root", "/var/tmp", "/run"):
    path = os.path.join(place, "creditgraph-probe")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        os.unlink(path)
        found.append("it can write to " + place)
    except OSError:
        pass
try:
    if len(socket.if_nameindex()) > 1:
        found.append("it sees the host's network")
except OSError:
    pass
count = 0
try:
    while count < 64:
        if os.fork() == 0:
            os.pause() if hasattr(os, "pause") else __import__("signal").pause()
        count += 1
    found.append("the limit of processes does not hold")
except OSError:
    pass
print(json.dumps(found), flush=True)
os._exit(0)
"""


def failures(way: Isolation) -> str:
    """Why this way does not isolate, "" when it does."""
    limits = Limits(seconds=20.0, memory_mb=256, processes=8, files_mb=4, output_kb=64)
    result = run_programs([Program(source=PROBE, tests=(Test(input=""),))], way, limits, workers=1)[0][0]
    if result.status != "exit" or result.code != 0:
        return result.reason or f"the probe ended with {result.status} {result.code}"
    try:
        found = json.loads(result.out)
    except ValueError:
        return f"the probe said '{result.out[:80]}'"
    return ", ".join(map(str, found))
