"""`headrace collect-env`: what a report of a bug needs to say about the machine, within 3 seconds.

Nothing is imported that could fail: torch is asked in a process of its own, drivers through their
programs, and what does not answer in time is told as such.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from headrace.base import env
from headrace.memory.host_memory import CGROUP, MEMINFO, container_limit, numbers_of
from headrace.version import __version__

SECONDS = 2.2  # for all programs together

# Distribution -> the extra that brings it; "" for what headrace always needs.
PACKAGES = {
    "torch": "",
    "numpy": "",
    "safetensors": "",
    "tokenizers": "",
    "jinja2": "",
    "huggingface_hub": "",
    "msgspec": "",
    "pyzmq": "",
    "tqdm": "",
    "fastapi": "server",
    "uvicorn": "server",
    "uvloop": "server",
    "httptools": "server",
    "pydantic": "server",
    "pyyaml": "server",
    "triton": "cuda",
    "xgrammar": "grammar",
    "flashinfer-python": "flashinfer",
    "sglang-kernel": "fa3",
    "gguf": "demo",
    "transformers": "bench",
    "accelerate": "bench",
    "matplotlib": "bench",
    "aiohttp": "bench",
}
# Of a CPU's flags those that decide how fast it multiplies.
CPU_FEATURES = (
    "avx2 f16c fma avx_vnni avx512f avx512bw avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 "
    "amx_int8 asimd asimddp fphp bf16 i8mm sve sve2"
)
ENVIRONMENT = (
    *("HEADRACE_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "HIP_", "ROCR_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "HF_", "TOKENIZERS_", "OPENAI_", "MALLOC_"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
_SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASS|CREDENTIAL|AUTH")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "(set, not shown)"

_ASK_TORCH = """
import json, torch
usable = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "cuda_usable": usable,
    "devices": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    if usable else [],
    "architectures": torch.cuda.get_arch_list(),
    "threads": torch.get_num_threads(),
}))
"""
_GPU_COLUMNS = ("name", "driver_version", "memory.total", "compute_cap")
_PROGRAMS: Mapping[str, Sequence[str]] = {
    "torch": (sys.executable, "-c", _ASK_TORCH),
    "gpus": ("nvidia-smi", f"--query-gpu={','.join(_GPU_COLUMNS)}", "--format=csv,noheader"),
    "driver": ("nvidia-smi",),
    "nvcc": ("nvcc", "--version"),
}

Section: TypeAlias = dict[str, Any]


def run(arguments: argparse.Namespace) -> int:
    found = collect()
    print(json.dumps(found, indent=2) if arguments.json else shown(found))
    return 0


def collect() -> dict[str, Section]:
    answers = _ask({**_PROGRAMS, "git": _git()}, SECONDS)
    return {
        "headrace": {
            "version": __version__,
            "commit": _commit(answers["git"]),
            "folder": str(_folder()),
        },
        "system": {
            "python": f"{platform.python_version()}, {sys.executable}",
            "os": _os_name(),
            "kernel": platform.platform(),
            **_cpu(Path("/proc/cpuinfo")),
            **_memory(MEMINFO, CGROUP),
        },
        "torch": _torch(answers["torch"]),
        "gpus": _gpus(answers),
        "packages": {name: _package(name, extra) for name, extra in PACKAGES.items()},
        "environment": relevant_environment(env.all_variables()),
    }


def shown(found: Mapping[str, Section]) -> str:
    """For people: a heading and a line for each thing."""
    parts = []
    for title, section in found.items():
        width = max(map(len, section), default=0)
        lines = [f"{name:<{width}}  {_plain(value)}" for name, value in section.items()]
        parts.append("\n".join([f"[{title}]", *(lines or ["none"])]))
    return "\n\n".join(parts)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return str(value)


def _ask(programs: Mapping[str, Sequence[str]], seconds: float) -> dict[str, str | Exception]:
    """Run programs side by side; what each printed, or why there is nothing."""
    deadline = monotonic() + seconds
    started: dict[str, subprocess.Popen[str] | Exception] = {}
    for name, command in programs.items():
        try:
            started[name] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        except OSError as error:
            started[name] = error
    return {
        name: each if isinstance(each, Exception) else _answer(each, deadline, seconds)
        for name, each in started.items()
    }


def _answer(process: "subprocess.Popen[str]", deadline: float, seconds: float) -> str | Exception:
    try:
        said, complaint = process.communicate(timeout=max(deadline - monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return TimeoutError(f"no answer within {seconds:g} s")
    if process.returncode != 0:
        lines = (complaint or said).strip().splitlines()
        return RuntimeError(lines[-1] if lines else f"exit status {process.returncode}")
    return said


def _torch(answer: str | Exception) -> Section:
    if isinstance(answer, str):
        told: Section = json.loads(answer)
        return told
    if isinstance(answer, TimeoutError):
        return {
            "version": _package("torch", ""),
            "import": f"{answer}; a first one takes long, try again",
        }
    return {"version": _package("torch", ""), "import": f"fails: {answer}"}


def _gpus(answers: Mapping[str, str | Exception]) -> Section:
    gpus, driver, nvcc = answers["gpus"], answers["driver"], answers["nvcc"]
    section: Section = {}
    if isinstance(gpus, str):
        for number, line in enumerate(gpus.strip().splitlines()):
            section[f"gpu {number}"] = line.strip()
        section["columns"] = list(_GPU_COLUMNS)
    else:
        missing = isinstance(gpus, FileNotFoundError)
        section["nvidia-smi"] = "not installed" if missing else str(gpus)
    if isinstance(driver, str) and (runs := re.search(r"CUDA.*?Version: *([\d.]+)", driver)):
        section["CUDA of the driver"] = runs[1]
    if isinstance(nvcc, str) and (release := re.search(r"release ([\d.]+)", nvcc)):
        section["CUDA toolkit"] = release[1]
    return section


def _package(name: str, extra: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        package = f"'headrace[{extra}]'" if extra else "headrace"
        return f"not installed (pip install {package})"


def _folder() -> Path:
    return Path(__file__).resolve().parents[1]


def _git() -> Sequence[str]:
    """Asks for the commit of the clone that runs; an answer is of use only where it is one."""
    clone = str(_folder().parents[1])
    return ("git", "-C", clone, "describe", "--always", "--dirty", "--exclude=*")


def _commit(answer: str | Exception) -> str:
    """Of the clone that runs, or of the one pip installed from."""
    if (_folder().parents[1] / ".git").exists():
        return answer.strip() if isinstance(answer, str) else f"unknown: {answer}"
    try:
        source = json.loads(Distribution.from_name("headrace").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        source = {}
    return str(source.get("vcs_info", {}).get("commit_id", "no clone"))


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _cpu(cpuinfo: Path) -> Section:
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        "cores": f"{os.cpu_count()}, of which {usable} usable",
        "cpu features": [name for name in CPU_FEATURES.split() if name in flags],
        "c++ compiler": shutil.which("g++") or "no g++",
    }


def _memory(meminfo: Path, cgroup: Path) -> Section:
    section: Section = {}
    if meminfo.exists():
        kibibytes = numbers_of(meminfo)
        for name in ("MemTotal", "MemAvailable"):
            section[name] = f"{kibibytes[name + ':'] / 2**20:.1f} GiB"
    limit = container_limit(cgroup)
    if limit is not None:
        section["container's limit"] = f"{limit / 2**30:.1f} GiB"
    shared = Path("/dev/shm")
    if shared.exists():
        section["/dev/shm free"] = f"{shutil.disk_usage(shared).free / 2**30:.1f} GiB"
    return section


def relevant_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What may change how an engine runs; secrets, and logins within addresses, are left out."""
    return {
        name: HIDDEN if _SECRET.search(name.upper()) else _LOGIN.sub("***@", value)
        for name, value in sorted(variables.items())
        if name.upper().startswith(ENVIRONMENT)
    }
