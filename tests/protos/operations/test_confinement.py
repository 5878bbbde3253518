"""Confinement: its numbers are the kernel's, its filter decides as it says, and what a kernel lacks is told."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.operations import confinement

HEADERS = Path("/usr/include")
GENERIC = HEADERS / "asm-generic" / "unistd.h"
ROOT = str(Path(__file__).resolve().parents[3])
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
X86 = 0xC000003E
SETS = {
    "arithmetic": confinement.ARITHMETIC,
    "interpreter": confinement.INTERPRETER,
    "conversing": confinement.CONVERSING,
    "receiving": confinement.RECEIVING,
}
HEAD = f"""import ctypes, errno, json, os, socket, sys
sys.path[0] = {ROOT!r}
from protos.operations import confinement as c
"""

needs_landlock = pytest.mark.skipif(not confinement.landlock_abi(), reason="this kernel has no Landlock")
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")


def run(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program beside the test; ``c`` is the module."""
    command = [sys.executable, "-B", "-c", HEAD + text, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def told(text: str, *arguments: str) -> Any:
    done = run(text, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


# ---------------------------------------------------------------- the parent's end


def test_a_process_whose_parent_has_ended_already_is_not_confined_and_reads_nothing() -> None:
    """The kernel tells of an end that comes; of one that came before, only the parent's number does."""
    text = """
found = []
for parent in (os.getppid(), os.getppid() + 1):
    try:
        c.end_with(parent)
        found.append("")
    except c.ConfinementError as fault:
        found.append(str(fault))
print(json.dumps(found))
"""
    assert told(text) == ["", "the process that started this one has ended"]


def test_the_end_of_the_parent_is_the_end_of_a_process_that_gave_up_its_rights() -> None:
    """Dropping capabilities may take back what was asked of the kernel."""
    signals = """
value = ctypes.c_int()
def told():
    assert ctypes.CDLL(None).prctl(2, ctypes.byref(value), 0, 0, 0) == 0  # PR_GET_PDEATHSIG
    return value.value
c.end_with(os.getppid())
c.drop_rights()
print(json.dumps(told()))
"""
    assert told(signals) == signal.SIGKILL


# ---------------------------------------------------------------- numbers


@on_x86
def test_the_numbers_of_calls_are_those_of_this_kernels_headers() -> None:
    header = HEADERS / "x86_64-linux-gnu" / "asm" / "unistd_64.h"
    if not header.exists():
        pytest.skip("linux-libc-dev is not installed")
    numbers = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR_(\w+) (\d+)", header.read_text())}
    assert {name: pair[0] for name, pair in confinement.CALLS.items()} == {
        name: numbers[name] for name in confinement.CALLS
    }
    landlock = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
    assert [numbers[name] for name in landlock] == [
        confinement._LANDLOCK_CREATE,
        confinement._LANDLOCK_ADD,
        confinement._LANDLOCK_RESTRICT,
    ]
    assert numbers["seccomp"] == confinement._MACHINES["x86_64"][2]


def test_the_numbers_for_aarch64_are_those_of_the_generic_table() -> None:
    """They were never run: the table is what there is."""
    if not GENERIC.exists():
        pytest.skip("linux-libc-dev is not installed")
    numbers = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR(?:3264)?_(\w+) (\d+)", GENERIC.read_text())}
    names = {name: "fstatat" if name == "newfstatat" else name for name in confinement.CALLS}  # of 64-bit machines
    assert {n: pair[1] for n, pair in confinement.CALLS.items()} == {
        n: numbers.get(name) for n, name in names.items()
    }
    assert numbers["landlock_create_ruleset"] == confinement._LANDLOCK_CREATE
    assert numbers["seccomp"] == confinement._MACHINES["aarch64"][2]


# ---------------------------------------------------------------- the filter, interpreted


def decide(program: bytes, number: int, arguments: tuple[int, ...] = (), audit: int = X86) -> int:
    """What the kernel would do: classic BPF over struct seccomp_data, the few instructions that are used."""
    data = struct.pack("<IIQ6Q", number, audit, 0, *(*arguments, *[0] * (6 - len(arguments))))
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at, value = 0, 0
    while True:
        code, right, wrong, operand = steps[at]
        at += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, operand)
            case 0x54:
                value &= operand
            case 0x15:
                at += right if value == operand else wrong
            case 0x35:
                at += right if value >= operand else wrong
            case 0x06:
                return operand
            case _:
                raise AssertionError(code)


@pytest.mark.parametrize("which", SETS)
def test_a_listed_call_is_allowed_and_every_other_fails(which: str) -> None:
    calls = SETS[which]
    program = confinement.filter_program(0, X86, calls)
    listed = {confinement.CALLS[name][0] for name in calls}
    conditional = {confinement.CALLS[name][0] for name in confinement._conditions()}
    for number in range(460):
        found = decide(program, number)
        if number in listed - conditional:
            assert found == ALLOW, number
        elif number not in listed:
            assert found == (ENOSYS if number in (435, *range(451, 460)) else EPERM), number
    assert len(program) // 8 < 4096  # what the kernel takes


def test_another_architecture_and_x32_kill() -> None:
    program = confinement.filter_program(0, X86, confinement.RECEIVING)
    assert decide(program, 0, audit=0x40000003) == KILL  # i386
    assert decide(program, 0, audit=0xC00000B7) == KILL
    assert {decide(program, 0x40000000 + number) for number in range(600)} == {KILL}
    assert decide(program, 0xFFFFFFFF) == KILL


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_arguments_decide_where_they_must(first: int, second: int) -> None:
    reading, receiving = (
        confinement.filter_program(0, X86, confinement.INTERPRETER),
        confinement.filter_program(0, X86, confinement.RECEIVING),
    )
    low = first & 0xFFFFFFFF

    def allowed(program: bytes, name: str, *arguments: int) -> bool:
        number = confinement.CALLS[name][0]
        assert number is not None
        return decide(program, number, arguments) == ALLOW

    writes = low & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | 0o20000000)
    assert allowed(reading, "openat", 0, 0, first) is (writes == 0)
    assert allowed(receiving, "openat", 0, 0, first)
    assert allowed(reading, "clone", first) is bool(low & 0x10000)
    assert allowed(reading, "prlimit64", first) is (low == 0)
    assert allowed(reading, "ioctl", 0, first) is (low in confinement._IOCTLS)
    stream = low == socket.AF_UNIX and second & 0xF == socket.SOCK_STREAM
    assert allowed(receiving, "socketpair", first, second) is stream
    assert allowed(receiving, "sendto", 0, 0, 0, first, second) is (not low & 0x20000000 and second == 0)
    assert allowed(receiving, "sendmsg", 0, 0, first) is (not low & 0x20000000)


@given(st.integers(0, 63), st.integers(0, 0xFFFFFFFF))
def test_a_pair_of_sockets_is_of_streams_between_its_own_two_ends(family: int, kind: int) -> None:
    """One of datagrams sends to any path, with descriptors. Of ``kind`` SOCK_CLOEXEC and SOCK_NONBLOCK are free."""
    program, (number, _) = confinement.filter_program(0, X86, confinement.RECEIVING), confinement.CALLS["socketpair"]
    assert number is not None
    stream = family == socket.AF_UNIX and kind & 0xF == socket.SOCK_STREAM
    assert (decide(program, number, (family, kind)) == ALLOW) is stream
    assert decide(program, number, (socket.AF_UNIX, kind & ~0xF | socket.SOCK_STREAM)) == ALLOW
    for other in set(range(16)) - {socket.SOCK_STREAM}:
        assert decide(program, number, (socket.AF_UNIX, kind & ~0xF | other)) == EPERM


def test_no_set_has_a_way_out_in_it() -> None:
    forbidden = (
        *("socket", "connect", "bind", "accept", "execve", "execveat", "fork", "vfork", "ptrace", "kill", "tkill"),
        *("process_vm_readv", "process_vm_writev", "pidfd_open", "pidfd_getfd", "io_uring_setup", "bpf", "unshare"),
        *("userfaultfd", "keyctl", "mount", "setns", "open", "creat", "openat2", "rename", "chmod", "sendmmsg"),
    )
    assert confinement.CALLS.keys().isdisjoint(forbidden)
    assert set(confinement.CALLS) == {"clone3", *confinement.RECEIVING}
    assert (
        set(confinement.ARITHMETIC)
        < set(confinement.INTERPRETER)
        < set(confinement.CONVERSING)
        < set(confinement.RECEIVING)
    )


# ---------------------------------------------------------------- in force


@on_x86
@needs_landlock
def test_a_call_of_x32_ends_the_process() -> None:
    done = run("c.confine(c.Allowed(c.INTERPRETER, c.interpreter()))\nctypes.CDLL(None).syscall(0x40000000 + 39)")
    assert done.returncode == -signal.SIGSYS


@needs_landlock
@pytest.mark.parametrize("abi", range(1, 8))
def test_every_version_of_landlock_closes_the_files(abi: int, tmp_path: Path) -> None:
    """The kernel takes the attributes of each older version; here those that it has itself."""
    if abi > confinement.landlock_abi():
        pytest.skip(f"this kernel's Landlock is of version {confinement.landlock_abi()}")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "spool").mkdir()
    text = f"""
c.landlock_abi = lambda: {abi}
bound = c.confine(c.Allowed(c.RECEIVING, c.interpreter(), {str(tmp_path / "spool")!r}), "required")
def outcome(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
print(json.dumps([bound, outcome(lambda: open({str(tmp_path / "secret")!r})), outcome(lambda: open("/proc/1/status")),
    outcome(lambda: open({str(tmp_path / "spool" / "new")!r}, "w")), outcome(lambda: open(os.__file__))]))
"""
    bound, *rest = told(text)
    assert set(bound) == {"no_new_privs", "no_capabilities", "landlock", "seccomp"}
    assert rest == ["EACCES", "EACCES", "done", "done"]


def test_a_process_with_two_threads_is_not_confined_by_half() -> None:
    text = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    c.confine(c.Allowed(c.INTERPRETER))
except c.ConfinementError as error:
    print(json.dumps(str(error)), flush=True)
os._exit(0)
"""
    assert "another thread" in told(text)


def test_a_demand_that_nobody_knows_is_refused() -> None:
    with pytest.raises(confinement.ConfinementError, match="available, required"):
        confinement.confine(confinement.Allowed(confinement.INTERPRETER), "none")


def test_what_lies_beside_the_packages_in_a_clone_is_not_the_interpreters() -> None:
    given_ = {Path(path).resolve() for path in confinement.interpreter()}
    assert Path(ROOT) not in given_
    assert Path(ROOT) / "protos" in given_
    assert not any(Path(ROOT) / "tests" in (path, *path.parents) for path in given_)


# ---------------------------------------------------------------- kernels that lack a layer

# A filter above the process: these calls fail as on a kernel without them, or as under a container's profile.
_ABOVE = """
import struct
def above(number, answers):
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | answers), (0x06, 0, 0, 0x7FFF0000)]
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    c._prctl(libc, 38, 1)
    prepared = c._Program(len(steps), program)
    assert libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(prepared), ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0
above(int(sys.argv[1]), int(sys.argv[2]))
"""
_CONFINE = """
try:
    print(json.dumps(c.confine(c.Allowed(c.INTERPRETER, c.interpreter()), sys.argv[3])))
except c.ConfinementError as error:
    print(json.dumps({"fault": str(error)}))
"""
_DOCTOR = """
from protos.operations import machine_checks as machine
print(json.dumps([(f.state, f.said) for f in machine.confinement(sys.argv[3])]))
"""
LANDLOCK, SECCOMP = "444", str(confinement._MACHINES.get(platform.machine(), (0, 0, 317))[2])


@needs_landlock
@pytest.mark.parametrize(("call", "layer"), [(LANDLOCK, "landlock"), (SECCOMP, "seccomp")])
def test_a_kernel_without_a_layer_goes_on_with_the_other_unless_it_is_demanded(call: str, layer: str) -> None:
    bound = told(_ABOVE + _CONFINE, call, str(errno.ENOSYS), "available")
    assert set(bound) == {"no_new_privs", "no_capabilities", "landlock", "seccomp"} - {layer}
    refused = told(_ABOVE + _CONFINE, call, str(errno.ENOSYS), "required")
    assert f"no {layer}" in refused["fault"]
    ((state, said),) = told(_ABOVE + _DOCTOR, call, str(errno.ENOSYS), "available")
    assert (state, f"no {layer}" in said) == ("note", True)
    ((state, said),) = told(_ABOVE + _DOCTOR, call, str(errno.ENOSYS), "required")
    assert (state, f"no {layer}" in said) == ("fail", True)


@needs_landlock
@pytest.mark.parametrize("call", [LANDLOCK, SECCOMP])
def test_a_layer_that_a_filter_hides_is_a_refusal_that_says_where_to_allow_it(call: str) -> None:
    for demand in confinement.DEMANDS:
        assert "systemd unit" in told(_ABOVE + _CONFINE, call, str(errno.EPERM), demand)["fault"]
        ((state, said),) = told(_ABOVE + _DOCTOR, call, str(errno.EPERM), demand)
        assert (state, "systemd unit" in said) == ("fail", True)


@needs_landlock
def test_doctor_names_the_layers_that_are_in_force() -> None:
    assert told(_DOCTOR, "", "", "required") == [["pass", "no_new_privs, no_capabilities, landlock, seccomp"]]


def test_the_doctor_does_not_believe_a_layer_that_does_not_hold() -> None:
    text = """
c._seccomp = lambda libc, calls: True
c.main()
"""
    assert set(told(text)["reached"]) == {"network", "processes"}
    assert ctypes.sizeof(confinement._Program) == 16
