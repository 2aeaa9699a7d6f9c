"""A virtual environment for each suite, kept under build/ until its requirements change."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTALL_SECONDS = 1200


class Unavailable(Exception):
    """Something the suite needs could not be fetched: nothing is known of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    folder: Path

    def tool(self, name: str) -> str:
        """The path of a program in it."""
        return str(self.folder / "bin" / name)

    def run(
        self,
        command: Sequence[str],
        *,
        log: Path,
        seconds: float,
        cwd: Path,
        variables: Mapping[str, str] | None = None,
    ) -> int:
        """Run one of its programs and keep what it says in `log`; returns the exit status.

        Raises:
            TimeoutError: it went on for more than `seconds`.
        """
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        kept |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", **(variables or {})}
        with log.open("w") as out:
            try:
                done = subprocess.run(
                    [self.tool(command[0]), *command[1:]],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    cwd=cwd,
                    env=kept,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"no end after {seconds:.0f} s; see {log}") from None
        return done.returncode


def make_environment(folder: Path, requirements: Sequence[str]) -> Environment:
    """The environment in `folder`, made if it is not there or of other requirements.

    Raises:
        Unavailable: pip could not get them.
    """
    wanted = hashlib.sha256("\n".join((sys.version, *requirements)).encode()).hexdigest()
    stamp = folder / ".requirements"
    environment = Environment(folder=folder)
    if stamp.exists() and stamp.read_text() == wanted:
        return environment
    print(f"conformance: making {folder} with {' '.join(requirements)}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip(environment, "install", *requirements)
    stamp.write_text(wanted)
    return environment


def pip(environment: Environment, *arguments: str) -> None:
    """Raises `Unavailable` with pip's own last words."""
    done = subprocess.run(
        [environment.tool("python"), "-m", "pip", "-q", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        told = " ".join(errors)[:500] or done.stderr[-500:]
        raise Unavailable(f"pip {' '.join(arguments)}: {told}")
