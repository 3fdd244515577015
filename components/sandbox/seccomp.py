"""The system-call filter of the sandbox, as a classic BPF program for ``bwrap --seccomp``.

Every call is refused but those on a list: what CPython, its standard library, numpy and the programs of the tests use.
A few of these are allowed with certain arguments only. A refused call fails with EPERM; one that is newer than the
first of the calls that libraries only try (clone3 and later) fails with ENOSYS, on which they use an older one. Calls
of another architecture end the process.

Not on the list, among others: sockets but connected pairs, namespaces, mounts and what tells about them, handles of
files and processes, other processes' memory and limits, keys, tracing, priorities, and memory or slots of the host
that no limit of the sandbox counts (memory files, System V and POSIX IPC, asynchronous input and output, timers).
"""

from __future__ import annotations

import platform
import struct

# Name → number on (x86_64, aarch64), −1 where the architecture has no such call. Source:
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.1.
# fmt: off
ALLOWED: dict[str, tuple[int, int]] = {
    # Files, within the mounts.
    "close": (3, 57), "close_range": (436, 436), "copy_file_range": (326, 285), "creat": (85, -1), "dup": (32, 23),
    "dup2": (33, -1), "dup3": (292, 24), "fadvise64": (221, 223), "fallocate": (285, 47), "fcntl": (72, 25),
    "fdatasync": (75, 83), "fsync": (74, 82), "ftruncate": (77, 46), "ioctl": (16, 29),
    "lseek": (8, 62), "open": (2, -1), "openat": (257, 56), "pipe": (22, -1), "pipe2": (293, 59), "pread64": (17, 67),
    "preadv": (295, 69), "preadv2": (327, 286), "pwrite64": (18, 68), "pwritev": (296, 70), "pwritev2": (328, 287),
    "read": (0, 63), "readv": (19, 65), "sendfile": (40, 71), "sync_file_range": (277, 84), "truncate": (76, 45),
    "umask": (95, 166), "write": (1, 64), "writev": (20, 66),
    # Names of files.
    "access": (21, -1), "chdir": (80, 49), "chmod": (90, -1), "faccessat": (269, 48), "faccessat2": (439, 439),
    "fchdir": (81, 50), "fchmod": (91, 52), "fchmodat": (268, 53), "fgetxattr": (193, 10), "flistxattr": (196, 13),
    "fstat": (5, 80), "fstatfs": (138, 44), "futimesat": (261, -1), "getcwd": (79, 17), "getdents": (78, -1),
    "getdents64": (217, 61), "getxattr": (191, 8), "lgetxattr": (192, 9), "link": (86, -1), "linkat": (265, 37),
    "listxattr": (194, 11), "llistxattr": (195, 12), "lstat": (6, -1), "mkdir": (83, -1), "mkdirat": (258, 34),
    "newfstatat": (262, 79), "readlink": (89, -1), "readlinkat": (267, 78), "rename": (82, -1), "renameat": (264, 38),
    "renameat2": (316, 276), "rmdir": (84, -1), "stat": (4, -1), "statfs": (137, 43), "statx": (332, 291),
    "symlink": (88, -1), "symlinkat": (266, 36), "unlink": (87, -1), "unlinkat": (263, 35), "utime": (132, -1),
    "utimensat": (280, 88), "utimes": (235, -1),
    # Memory.
    "brk": (12, 214), "madvise": (28, 233), "mmap": (9, 222), "mprotect": (10, 226), "mremap": (25, 216),
    "msync": (26, 227), "munmap": (11, 215),
    # Processes and threads of the program.
    "arch_prctl": (158, -1), "clone": (56, 220), "execve": (59, 221), "exit": (60, 93), "exit_group": (231, 94),
    "fork": (57, -1), "futex": (202, 98), "get_robust_list": (274, 100), "getcpu": (309, 168), "getpgid": (121, 155),
    "getpgrp": (111, -1), "getpid": (39, 172), "getppid": (110, 173), "getpriority": (140, 141), "getsid": (124, 156),
    "gettid": (186, 178), "prctl": (157, 167), "rseq": (334, 293), "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124), "set_robust_list": (273, 99), "set_tid_address": (218, 96), "setpgid": (109, 154),
    "setsid": (112, 157), "vfork": (58, -1), "wait4": (61, 260), "waitid": (247, 95),
    # Signals and waiting.
    "alarm": (37, -1), "clock_nanosleep": (230, 115), "epoll_create": (213, -1), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_pwait": (281, 22), "epoll_wait": (232, -1), "getitimer": (36, 102),
    "kill": (62, 129), "nanosleep": (35, 101), "pause": (34, -1), "poll": (7, -1), "ppoll": (271, 73),
    "pselect6": (270, 72), "restart_syscall": (219, 128), "rt_sigaction": (13, 134), "rt_sigpending": (127, 136),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137), "select": (23, -1), "setitimer": (38, 103), "sigaltstack": (131, 132),
    "tgkill": (234, 131), "tkill": (200, 130),
    # Pairs of connected sockets, as event loops use to wake themselves.
    "getpeername": (52, 205), "getsockname": (51, 204), "getsockopt": (55, 209), "recvfrom": (45, 207),
    "sendto": (44, 206), "shutdown": (48, 210), "socketpair": (53, 199),
    # Time, limits and facts of the machine.
    "clock_getres": (229, 114), "clock_gettime": (228, 113), "getrandom": (318, 278), "getrlimit": (97, 163),
    "getrusage": (98, 165), "gettimeofday": (96, 169), "prlimit64": (302, 261), "setrlimit": (160, 164),
    "sysinfo": (99, 179), "time": (201, -1), "times": (100, 153), "uname": (63, 160),
    # Identities: read by everyone; set by the runner, and refused by the kernel after it.
    "getegid": (108, 177), "geteuid": (107, 175), "getgid": (104, 176), "getgroups": (115, 158),
    "getresgid": (120, 150), "getresuid": (118, 148), "getuid": (102, 174), "setgroups": (116, 159),
    "setresgid": (119, 149), "setresuid": (117, 147),
}
# fmt: on

# Calls of which only some are allowed: name → (index of the argument, its allowed values); only its low 32 bits count.
ARGUMENTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "prlimit64": (0, (0,)),  # of the calling process: limits of another one would carry values from test to test
    "prctl": (0, (1, 3, 15, 16)),  # PR_SET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME
    "ioctl": (
        1,
        (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451),
    ),  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, close on exec
    # Duplicates and flags; not signals to an owner, leases, watches, sizes of pipes and seals. No locks: one of
    # /dev/null or of a mounted library is a lock of the host's file.
    "fcntl": (1, (0, 1, 2, 3, 4, 1030)),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_X32 = 0x40000000  # calls of the x32 ABI have this bit and different numbers
_FIRST_TRIED = 435  # clone3, whose flags are in memory, where a filter cannot look
# Results of a filter: SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ERRNO with EPERM and with ENOSYS.
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_EPERM = 0x00050001
_ENOSYS = 0x00050026
# BPF instructions: load a 32-bit word of seccomp_data; jump if equal, if at least, if any bit is set; return.
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
# Offsets in seccomp_data; an argument has eight bytes, the low four first.
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_ARGUMENTS_AT = 16


def available(machine: str = "") -> bool:
    """Whether there is a filter for this processor."""
    return (machine or platform.machine()) in _ARCHITECTURES


def filter_program(machine: str = "") -> bytes:
    """The filter as an array of struct sock_filter (8 bytes each); raises KeyError for an unknown processor."""
    column, architecture = _ARCHITECTURES[machine or platform.machine()]
    # (operation, instructions to skip if true, if false, operand)
    code = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    code += [(_LOAD, 0, 0, _NUMBER_AT)]
    if column == 0:
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for name, numbers in ALLOWED.items():
        number = numbers[column]
        if number < 0:
            continue
        if name == "clone":
            answer = [(_LOAD, 0, 0, _ARGUMENTS_AT), (_ANY_BIT, 0, 1, _NEW_NAMESPACES)]
            answer += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
        elif name in ARGUMENTS:
            argument, values = ARGUMENTS[name]
            answer = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument)]
            for value in values:
                answer += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
            answer += [(_RETURN, 0, 0, _EPERM)]
        else:
            answer = [(_RETURN, 0, 0, _ALLOW)]
        code += [(_EQUAL, 0, len(answer), number), *answer]
    code += [(_AT_LEAST, 0, 1, _FIRST_TRIED), (_RETURN, 0, 0, _ENOSYS), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
