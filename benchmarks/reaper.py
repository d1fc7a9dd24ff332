"""Has the processes of a server end with the script that started it, however that ends: also by SIGKILL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_CODE = """
import os, signal, sys
sys.stdin.buffer.read()  # its end is the end of the script
for name in os.listdir("/proc"):
    try:
        fields = open(f"/proc/{name}/stat").read().rpartition(")")[2].split() if name.isdigit() else []
        if fields and fields[3] == sys.argv[1]:
            os.kill(int(name), signal.SIGKILL)
    except OSError:
        pass
"""


@contextmanager
def ends_with_us(session: int) -> Iterator[None]:
    """Within it, and when it is left, the end of this process is the end of the session that `session` leads: of the server, and
    of what it has started."""
    reaper = subprocess.Popen(
        [sys.executable, "-c", _CODE, str(session)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert reaper.stdin is not None
    try:
        yield
    finally:
        reaper.stdin.close()
        reaper.wait()
