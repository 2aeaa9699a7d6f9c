"""`headrace serve MODEL`: the HTTP server."""

import argparse

from headrace.base.errors import UnsupportedError
from headrace.base.log import log_to_stderr
from headrace.cli.serve_flags import serve_engine_config, server_config
from headrace.serving.address import bind

INSTALL = "pip install 'headrace[server]'"


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 after SIGTERM or ctrl-c and a drain, 1 when the engine died, 128 + n after a second
    signal n."""
    asked, config = serve_engine_config(arguments), server_config(arguments)
    log_to_stderr(config.log_level)
    listening = bind(config)  # a taken port shows before torch is imported
    try:
        from headrace.serving.launch import serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("headrace"):
            raise
        raise UnsupportedError(
            f"headrace serve needs the package {error.name}", remedy=f"Run {INSTALL}"
        ) from error
    return serve(asked, config, listening)
