"""`headrace chat` on a terminal: prompt, ctrl-c while typing, ctrl-d."""

import os
import pty
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
chat.start = lambda arguments: FakeLLM()
sys.exit(main(["chat", "m"]))
"""


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, program: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", program])
        self.shown = ""

    def wait_for(self, text: str, times: int = 1, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while self.shown.count(text) < times:
            assert time.monotonic() < end, f"no {text!r} in {self.shown!r}"
            self.shown += os.read(self.descriptor, 4096).decode()

    def send(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def exit_status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a pseudo-terminal")
def test_prompt_ctrl_c_and_ctrl_d() -> None:
    terminal = Terminal(PROGRAM.format(folder=str(Path(__file__).parent)))
    terminal.wait_for("> ")
    terminal.send("hello\n")
    terminal.wait_for("Hello there")
    terminal.wait_for("> ", times=2)
    terminal.send("\x03")
    terminal.wait_for("(/exit or ctrl-d to leave)")
    terminal.wait_for("> ", times=3)
    terminal.send("again\n")
    terminal.wait_for("Hello there", times=2)
    terminal.send("\x04")
    assert terminal.exit_status() == 0
