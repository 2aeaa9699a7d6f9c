"""`headrace chat` on a terminal: prompt, ctrl-c while typing, ctrl-d."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from fake_llm import FakeLLM
import headrace.cli.chat as chat
from headrace.cli.main import main
chat.start = lambda arguments, **_: FakeLLM()
sys.exit(main(["chat", "m"]))
"""


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, program: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", program])
        self.shown = ""

    def wait_for(self, text: str, times: int = 1) -> None:
        assert self.shows(text, times, seconds=30.0), f"no {text!r} in {self.shown!r}"

    def shows(self, text: str, times: int, seconds: float) -> bool:
        """Whether `text` has come `times` times, at the latest in so many seconds."""
        end = time.monotonic() + seconds
        while self.shown.count(text) < times:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.descriptor], [], [], left)[0]:
                return False
            self.shown += os.read(self.descriptor, 4096).decode()
        return True

    def interrupt(self, until: str) -> None:
        """ctrl-c; again if need be: one that comes just before `input` listens waits for a key."""
        for _ in range(20):
            self.send("\x03")
            if self.shows(until, 1, seconds=1.0):
                return
        raise AssertionError(f"no {until!r} in {self.shown!r}")

    def send(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def end(self) -> int:
        """The exit status; a program that still runs is killed."""
        for _ in range(100):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"still running after {self.shown!r}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a pseudo-terminal")
def test_prompt_ctrl_c_and_ctrl_d() -> None:
    terminal = Terminal(PROGRAM.format(folder=str(Path(__file__).parent)))
    terminal.wait_for("> ")
    terminal.send("hello\n")
    terminal.wait_for("Hello there")
    terminal.wait_for("> ", times=2)
    terminal.interrupt(until="(/exit or ctrl-d to leave)")
    terminal.wait_for("> ", times=3)
    terminal.send("again\n")
    terminal.wait_for("Hello there", times=2)
    terminal.wait_for("> ", times=4)
    terminal.send("\x04")
    assert terminal.end() == 0
