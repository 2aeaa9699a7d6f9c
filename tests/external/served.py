"""`headrace serve` for the time of a suite."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from running_server import RunningServer


@contextmanager
def serving(model: Path | str, *flags: str, log: Path) -> Iterator[str]:
    """Its address, without /v1. What the server said is in `log` at the end.

    Raises:
        RuntimeError: it did not survive the suite.
    """
    server = RunningServer(Path(model), "--load-format", "auto", *flags)
    try:
        yield server.url
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.process.poll()}; see {log}")
    finally:
        server.process.terminate()
        server.status()
        log.write_text("\n".join(server.lines))
