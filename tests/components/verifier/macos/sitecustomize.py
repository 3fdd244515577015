"""Imported by each Python that has this folder in PYTHONPATH: takes away what macOS lacks."""

import builtins
import io
import os
import resource
import select
import signal
import sys

MISSING = {
    os: "sched_getaffinity sched_setaffinity memfd_create pidfd_open posix_fadvise posix_fallocate eventfd splice "
    "copy_file_range setresuid setresgid getrandom fdatasync pipe2 O_TMPFILE O_DIRECT O_PATH",
    select: "epoll",
    signal: "SIGPWR SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo pidfd_send_signal",
    resource: "prlimit",
}
LINUX = ("/proc/", "/sys/", "/dev/shm")

for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

setrlimit = resource.setrlimit


def refused(kind, limits):
    """macOS refuses limits of memory and, from Python, those of the stack."""
    if kind in (resource.RLIMIT_AS, resource.RLIMIT_STACK):
        raise ValueError("current limit exceeds maximum limit")
    setrlimit(kind, limits)


def absent(function):
    """The function, for which no file of Linux is there."""

    def called(path, *args, **options):
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(LINUX):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
        return function(path, *args, **options)

    return called


resource.setrlimit = refused
io.open = builtins.open = absent(builtins.open)
for name in ("open", "listdir", "scandir", "stat", "statvfs", "mkdir"):
    setattr(os, name, absent(getattr(os, name)))
# torch, which these two do not import, would look for its libraries under other names.
if any(argument.endswith(("math_worker.py", "sandbox/runner.py")) for argument in sys.orig_argv):
    sys.platform = "darwin"
