"""A process that lets go of large blocks of memory has it no more."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# blocks of 21 MiB, as an update of 11 million numbers: the first one that is freed teaches glibc to keep the next
FREED = """
import ctypes
from pathlib import Path
from protos.operations.heap import large_ones_go_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if {told}:
    assert large_ones_go_back()
before, size = resident(), 21 << 20
for _ in range(3):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    pin = libc.malloc(64)  # what stays, behind it
    libc.free(block)
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told so")
@pytest.mark.parametrize("told", [True, False])
def test_a_large_block_that_is_let_go_of_is_the_systems_again(told: bool) -> None:
    script = FREED.format(told=told)
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    kept = int(found.stdout)
    assert kept < 4 << 20 if told else kept > 16 << 20
