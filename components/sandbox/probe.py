"""Finds an isolation that works on this host, with a program that tries simple ways of leaving the sandbox."""

import json
import os
import shutil
import sys
from functools import cache

from creditgraph.components.sandbox.isolation import INSTALL, Isolation, base_interpreter, refusal
from creditgraph.components.sandbox.limits import Limits
from creditgraph.components.sandbox.pool import Program, run_programs
from creditgraph.pipeline.core.errors import RunError

# It prints a list of escapes, none of which must be possible.
PROBE = """
import json, os, socket
escapes = []
if os.getpid() > 20:
    escapes.append("it sees the host's processes")
if os.geteuid() == 0:
    escapes.append("it runs as root")
for place in ("/", "/usr/lib", "/dev", "/dev/shm", "/etc", "/home", "/root", "/var/tmp", "/run"):
    path = os.path.join(place, "creditgraph-probe")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        os.unlink(path)
        escapes.append("it can write to " + place)
    except OSError:
        pass
try:
    if len(socket.if_nameindex()) > 1:
        escapes.append("it sees the host's network")
except OSError:
    pass
count = 0
try:
    while count < 64:
        if os.fork() == 0:
            os.pause() if hasattr(os, "pause") else __import__("signal").pause()
        count += 1
    escapes.append("the limit of processes does not hold")
except OSError:
    pass
print(json.dumps(escapes), flush=True)
os._exit(0)
"""


def failures(isolation: Isolation) -> str:
    """Returns why an isolation does not work, "" if it does."""
    limits = Limits(seconds=20.0, memory_mb=256, processes=8, files_mb=4, output_kb=64)
    result = run_programs([Program(source=PROBE, inputs=[""])], isolation, limits, workers=1)[0][0]
    if result.status != "exit" or result.code != 0:
        return result.reason or f"the probe ended with {result.status} {result.code}"
    try:
        return ", ".join(map(str, json.loads(result.out)))
    except ValueError:
        return f"the probe wrote '{result.out[:80]}'"


@cache
def find_isolation(interpreter: str = "", packages: tuple[str, ...] = ()) -> Isolation:
    """Returns the first isolation that works on this host, determined by trying.

    Raises:
        RunError: none works; the error has the reason, a remedy, and how to run without isolation.
    """
    python = os.path.realpath(interpreter) if interpreter else base_interpreter()
    if not os.path.exists(python):
        raise RunError(
            f"sandbox: interpreter {python} does not exist, expected Python 3.11 or newer. Correct the setting "
            "interpreter."
        )
    for folder in packages:
        if not os.path.isdir(folder):
            raise RunError(f"sandbox: packages: {folder} is not a folder, expected folders with Python packages.")
        if os.stat(folder).st_mode & 0o005 != 0o005:
            raise RunError(
                f"sandbox: packages: {folder} is closed to other users, as whom programs run, expected mode 755. Run "
                "chmod o+rx."
            )
    if not sys.platform.startswith("linux"):
        raise refusal(f"{sys.platform} has no namespaces", "Run on Linux")
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise refusal("bubblewrap (bwrap) is not installed", INSTALL)
    reasons = []
    # Root first tries without a user namespace, which some hosts forbid even to root.
    for user_namespace in (False, True) if os.geteuid() == 0 else (True,):
        isolation = Isolation(
            bubblewrap=bubblewrap, user_namespace=user_namespace, interpreter=python, packages=packages
        )
        reason = failures(isolation)
        if not reason:
            return isolation
        reasons.append(reason)
    raise refusal(
        "; ".join(dict.fromkeys(reasons)),
        "Allow user namespaces (sysctl user.max_user_namespaces, the container's seccomp profile)",
    )
