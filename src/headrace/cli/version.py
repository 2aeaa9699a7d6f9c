"""`headrace version`."""

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version

from headrace.version import __version__

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "gguf")


def run(arguments: argparse.Namespace) -> int:
    found = {"headrace": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, number in found.items():
            print(f"{name:<12} {number}")
    return 0
