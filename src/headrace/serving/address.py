"""The address to listen on, bound before anything slow is imported or loaded."""

import socket

from headrace.base.errors import ConfigError
from headrace.serving.server_config import ServerConfig

_BACKLOG = 2048


def bind(config: ServerConfig) -> socket.socket:
    """A socket that listens on the address that was asked.

    Raises:
        ConfigError: the port is taken, or this machine has no such address.
    """
    place = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"host is {config.host!r}", why=str(error), remedy="Name an address of this machine"
        ) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"Cannot listen on {place}",
            why=error.strerror or str(error),
            remedy="Name another --port (0: one that is free) or --host",
        ) from error
    return listening
