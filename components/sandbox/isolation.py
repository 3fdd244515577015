"""Isolation of a program on this host: the bubblewrap command with its namespaces, mounts and system-call filter."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from creditgraph.components.sandbox import seccomp
from creditgraph.components.sandbox.limits import MEGABYTE, Limits
from creditgraph.pipeline.core.errors import RunError

RUNNER = Path(__file__).with_name("runner.py")
INSTALL = "Install it with `apt-get install bubblewrap`"
# User ids that no account has; each process of this host has 64 of them, one for each sandbox it runs at a time.
_FIRST_USER = 1_000_000_000
_USERS = 64
_MAX_PID = 4_194_304  # of a 64-bit kernel


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """One way to start the runner.

    Attributes:
        bubblewrap: path of bwrap, "" for none: limits only, no namespaces.
        user_namespace: whether programs run as the caller in a user namespace; otherwise (root) they run as a user id
            that nothing else uses.
        interpreter: Python that runs the programs.
        packages: folders on its module path, mounted read-only.
    """

    bubblewrap: str
    user_namespace: bool
    interpreter: str
    packages: tuple[str, ...] = ()

    def user_of(self, slot: int) -> int:
        """User id of the program in this slot, 0 to keep the caller's. No two running programs of a host share one."""
        if not self.bubblewrap or self.user_namespace:
            return 0
        return _FIRST_USER + os.getpid() % _MAX_PID * _USERS + slot

    def module_path(self) -> list[str]:
        """Paths of `packages` as programs see them; they differ inside the sandbox."""
        return [f"/packages/{i}" for i in range(len(self.packages))] if self.bubblewrap else list(self.packages)

    def command(self, limits: Limits, filter_fd: int) -> list[str]:
        """The command that starts the runner; `filter_fd` is a descriptor with the system-call filter, −1 for none."""
        python = [self.interpreter, "-S", "-s", "-E", "-P", "-B", "-X", "utf8"]
        if not self.bubblewrap:
            return [*python, str(RUNNER)]
        namespaces = "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try"
        command = [self.bubblewrap, *namespaces.split()]
        command += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox", "--cap-drop", "ALL"]
        if self.user_namespace:
            command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        else:
            # For the runner, which drops them at its start.
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        for name, value in (("HOME", "/tmp"), ("PATH", "/usr/bin"), ("LANG", "C.UTF-8"), ("OMP_NUM_THREADS", "1")):
            command += ["--setenv", name, value]
        folders = _read_only(self.interpreter)
        # Parent folders of binds, which bubblewrap would otherwise make accessible to their owner only.
        bound = [*folders, "/dev/null", "/sandbox/runner.py", *self.module_path()]
        for parent in sorted({str(parent) for folder in bound for parent in Path(folder).parents} - {"/"}):
            command += ["--perms", "0755", "--dir", parent]
        for folder in folders:
            command += ["--ro-bind", folder, folder]
        for link in ("/lib", "/lib32", "/lib64"):
            if os.path.islink(link):
                command += ["--symlink", os.readlink(link), link]
        for folder, place in zip(self.packages, self.module_path(), strict=True):
            command += ["--ro-bind", folder, place]
        for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
            command += ["--dev-bind", device, device]
        command += ["--ro-bind", str(RUNNER), "/sandbox/runner.py"]
        command += ["--perms", "1777", "--size", str(limits.files_mb * MEGABYTE), "--tmpfs", "/tmp"]
        command += ["--chdir", "/tmp", "--remount-ro", "/"]
        if filter_fd >= 0:
            command += ["--seccomp", str(filter_fd)]
        # Neither /proc nor /sys nor a shell: nothing a program for a coding problem needs, and half of all tricks.
        return [*command, *python, "/sandbox/runner.py"]


def _read_only(interpreter: str) -> list[str]:
    """Folders and files a program may read: the interpreter, its library, the C library."""
    prefix = Path(interpreter).parent.parent
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache"]
    paths = dict.fromkeys([*system, interpreter, str(prefix / "lib"), str(prefix / "lib64")])
    real = [path for path in paths if os.path.exists(path) and not os.path.islink(path)]
    return [path for path in real if not any(path != other and Path(path).is_relative_to(other) for other in real)]


def base_interpreter() -> str:
    """This Python without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def no_isolation(interpreter: str = "", packages: tuple[str, ...] = ()) -> Isolation:
    """Isolation by limits only: programs can do whatever the caller can."""
    python = interpreter or base_interpreter()
    return Isolation(bubblewrap="", user_namespace=False, interpreter=python, packages=packages)


def refusal(reason: str, remedy: str) -> RunError:
    """The error on a host that cannot isolate."""
    return RunError(
        f"sandbox: this host cannot isolate generated programs ({reason}), expected bubblewrap with namespaces of its "
        f"own for processes, mounts and network. {remedy}, or set allow_unsandboxed: true to run them with limits of "
        "time and memory only: they could then read and change whatever you can."
    )


def open_filter() -> int:
    """A descriptor with the system-call filter to read, −1 on a processor without one. The caller closes it."""
    if not seccomp.available():
        return -1
    read, write = os.pipe()
    os.write(write, seccomp.filter_program())  # 1 kB; a pipe holds 64 kB
    os.close(write)
    return read
