"""Free memory goes back to the system, also between the scans of many scenes."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
from support import ROOT

# Blocks that are freed below one that stays in use, so that the heap cannot shrink at its end.
PROGRAM = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
from mapsage.base.process import return_free_memory

def resident():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [library.malloc(100_000) for _ in range(400)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
last = library.malloc(100_000)
for block in blocks:
    library.free(block)
before = resident()
return_free_memory()
print(before - resident())
"""


def test_free_memory_is_returned() -> None:
    if not hasattr(ctypes.CDLL(None), 'malloc_trim'):
        pytest.skip('the C library is not glibc')
    done = subprocess.run(
        [
            sys.executable,
            '-W',
            'ignore',
            '-c',
            'import mapsage_launcher.only_help as start\n'
            'with start.only_help():\n    import mapsage\n' + PROGRAM,
            str(ROOT),
        ],
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # 40 MB are free.
    assert int(done.stdout.split()[-1]) > 35e6
