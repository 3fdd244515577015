"""The system-call filter, run by a small interpreter of its instructions: only what is on the list is allowed."""

import struct

import pytest

from creditgraph.components.sandbox import seccomp

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def answer(machine, number, *arguments, architecture=None):
    """What the filter returns for a call."""
    code = list(struct.iter_unpack("<HBBI", seccomp.filter_program(machine)))
    architecture = ARCHITECTURE[machine] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator = 0
    at = 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, operand)[0]
        elif operation == 0x06:
            return operand
        else:
            jump = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            at += if_true if jump[operation] else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_only_calls_on_the_list_are_allowed(machine, column):
    listed = {numbers[column] for name, numbers in seccomp.ALLOWED.items() if name not in seccomp.ARGUMENTS} - {-1}
    some = {seccomp.ALLOWED[name][column] for name in seccomp.ARGUMENTS}
    for number in [*range(600), 10_000, 2**30 - 1]:
        expected = ALLOW if number in listed else ENOSYS if number >= 435 else EPERM
        assert number in some or answer(machine, number) == expected, number


@pytest.mark.parametrize("machine", ARCHITECTURE)
def test_arguments_of_calls_that_are_allowed_in_part(machine):
    number = {name: numbers[machine == "aarch64"] for name, numbers in seccomp.ALLOWED.items()}
    assert answer(machine, number["clone"], 0x003D0F00) == ALLOW  # a thread
    for namespace in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(machine, number["clone"], 17 | namespace) == EPERM
    assert answer(machine, number["prlimit64"], 0, 9) == ALLOW
    assert answer(machine, number["prlimit64"], 1 << 32) == ALLOW  # the kernel reads 32 bits too: a zero
    assert answer(machine, number["prlimit64"], 2, 9) == EPERM
    assert answer(machine, number["prctl"], 15) == ALLOW
    assert answer(machine, number["prctl"], 36) == EPERM
    assert answer(machine, number["ioctl"], 0, 0x5401) == ALLOW
    assert answer(machine, number["ioctl"], 0, 0x5412) == EPERM  # TIOCSTI
    assert answer(machine, number["fcntl"], 1, 1030) == ALLOW
    for locks in (5, 6, 7, 36, 37, 38):
        assert answer(machine, number["fcntl"], 1, locks) == EPERM
    assert answer(machine, number["fcntl"], 1, 1031) == EPERM


def test_other_architectures_end_the_process():
    assert answer("x86_64", 20, architecture=0x40000003) == KILL  # i386, where 20 is getpid
    assert answer("x86_64", 0x40000000 + 39) == KILL  # x32
    assert answer("aarch64", 172, architecture=0x40000028) == KILL  # ARM
    assert not seccomp.available("riscv64")
    with pytest.raises(KeyError):
        seccomp.filter_program("riscv64")


def test_the_program_is_short_enough_for_the_kernel():
    assert all(len(seccomp.filter_program(machine)) < 4096 * 8 for machine in ARCHITECTURE)
