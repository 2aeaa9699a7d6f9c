"""`headrace serve` as a process of its own."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

from headrace.base import env

SECONDS = 60


class RunningServer:
    """Starts it on a free port and waits until it says that it is ready.

    Attributes:
        url: where it answers. lines: what it said on stderr, engine included.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        arguments = [str(folder), "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.main", "serve", *arguments, "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=env.child_environment({"OMP_NUM_THREADS": "1"}),
        )
        self.lines: list[str] = []
        Thread(target=self._read, daemon=True).start()
        self.url = self.wait_for(r"(http://\S+)/v1;")[1]

    def wait_for(self, pattern: str, seconds: float = SECONDS) -> re.Match[str]:
        """The first line that matches."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.lines):
                found = re.search(pattern, line)
                if found is not None:
                    return found
            assert self.process.poll() is None or seconds != SECONDS, "".join(self.lines)
            time.sleep(0.02)
        raise AssertionError(f"no line matches {pattern}: {''.join(self.lines)}")

    def status(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(timeout=SECONDS)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"
