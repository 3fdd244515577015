"""The system-call filter of the sandbox, as a classic BPF program for ``bwrap --seccomp``.

Calls that a program for a coding problem never needs, and that widen what an attack can reach or spend, fail with
EPERM: other processes' memory, namespaces, mounts, keys, kernel tracing, sockets, and memory that no limit of the
sandbox counts (memfd, System V shared memory, io_uring). Calls of another architecture end the process.
"""

from __future__ import annotations

import platform
import struct

# Name → number on (x86_64, aarch64), −1 where the architecture has no such call. Source:
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.1.
FORBIDDEN: dict[str, tuple[int, int]] = {
    # Other processes' memory and descriptors.
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "userfaultfd": (323, 282),
    # Memory that no limit of the sandbox counts.
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "semget": (64, 190),
    "shmget": (29, 194),
    # Sockets, and handles that open files outside the mounts.
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "socket": (41, 198),
    # Namespaces and mounts.
    "chroot": (161, 51),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
    # Keys, kernel tracing and watching of files.
    "add_key": (248, 217),
    "bpf": (321, 280),
    "fanotify_init": (300, 262),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "request_key": (249, 218),
    "syslog": (103, 116),
    # Placement of memory.
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy": (238, 237),
    # The host itself: modules, clocks, names, swap, hardware.
    "acct": (163, 89),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "modify_ldt": (154, -1),
    "personality": (135, 92),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "vhangup": (153, 58),
}

_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}  # column, AUDIT_ARCH, number of clone
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_X32 = 0x40000000  # calls of the x32 ABI have this bit and different numbers
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
# Offsets in seccomp_data.
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_FIRST_ARGUMENT_AT = 16


def available(machine: str = "") -> bool:
    """Whether there is a filter for this processor."""
    return (machine or platform.machine()) in _ARCHITECTURES


def filter_program(machine: str = "") -> bytes:
    """The filter as an array of struct sock_filter (8 bytes each); raises KeyError for an unknown processor."""
    column, architecture, clone = _ARCHITECTURES[machine or platform.machine()]
    # (operation, instructions to skip if true, if false, operand)
    code = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    code += [(_LOAD, 0, 0, _NUMBER_AT)]
    if column == 0:
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for number in sorted(numbers[column] for numbers in FORBIDDEN.values() if numbers[column] >= 0):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    # The flags of clone3 are in memory, where a filter cannot look. On ENOSYS libc uses clone.
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    code += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_ANY_BIT, 0, 1, _NEW_NAMESPACES)]
    code += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
