"""A headless Chromium over its own pipe (DevTools protocol), without any driver package."""

import base64
import json
import os
import shutil
import subprocess
import time
from itertools import count
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
SECONDS = 20.0


class Chromium:
    """One page. Use as a context manager.

    Attributes:
        complaints: what the page's console said at level warning and above, uncaught errors and
            violations of its content security policy included.
    """

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        down, self._out = os.pipe()
        self._in, up = os.pipe()
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        quiet = ("--no-first-run", "--disable-extensions", "--disable-background-networking")
        pipe = ("--remote-debugging-pipe", f"--user-data-dir={profile}")
        # The program reads commands from 3 and answers on 4; a shell puts the pipes there.
        shell = f'exec "$@" 3<&{down} 4>&{up}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", PROGRAM, *options, *quiet, *pipe, "about:blank"],
            pass_fds=(down, up),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down)
        os.close(up)
        self.complaints: list[str] = []
        self._numbers, self._read, self._session = count(1), b"", ""

    def __enter__(self) -> "Chromium":
        pages = self._call("Target.getTargets")["targetInfos"]
        (page,) = [each["targetId"] for each in pages if each["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def size(self, width: int, height: int, *, scale: float = 1, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale}
        self._call("Emulation.setDeviceMetricsOverride", **metrics, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def value(self, expression: str) -> Any:
        """Of JavaScript, in plain types."""
        told = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never: {expression}\n{self.complaints}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def point(self, selector: str, across: float = 0.5) -> None:
        """Put the mouse over an element, so far across."""
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height] })()"
        )
        x, y = box[0] + across * box[2], box[1] + box[3] / 2
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def write(self, selector: str, text: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self._call("Input.insertText", text=text)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == number:
                assert "error" not in told, (method, told)
                return dict(told["result"])
            self._hear(told)

    def _hear(self, told: dict[str, Any]) -> None:
        method, parameters = told.get("method"), told.get("params", {})
        entry = parameters.get("entry", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and entry["level"] in ("warning", "error"):
            self.complaints.append(entry["text"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium has ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))
