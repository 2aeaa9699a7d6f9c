"""What the operator asks of the server. Imports nothing heavy: `--help` reads the fields."""

import re
from dataclasses import dataclass, fields

from headrace.base.errors import ConfigError
from headrace.config.checks import MAX_INT32, flag, one_of, optional, text, whole
from headrace.config.engine_config import option

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s\"'\]]+")
LOG_LEVELS = ("debug", "info", "warning", "error")
_NAMES = optional(text("names, separated by commas"))
_FILE = optional(text("paths of files"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of `headrace serve` that are not the engine's; flags of the command line.

    Raises:
        ConfigError: a value is of another type or outside its range, or two do not go together.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all", text("addresses"))
    port: int = option(30000, "port to listen on; 0: one that is free", whole(0, 65535))
    api_key: str | None = option(
        None, "key that requests must bring (Authorization: Bearer KEY)", optional(text("texts"))
    )
    admin_api_key: str | None = option(
        None, "key of the admin routes, which are off without one", optional(text("texts"))
    )
    enable_admin: bool = option(False, "open the admin routes to whoever may send requests", flag)
    served_model_name: str | None = option(
        None, "names the model answers to, separated by commas; by default its path", _NAMES
    )
    check_model_name: bool = option(
        True, "refuse requests that name another model; off: the name is not read", flag
    )
    refuse_unsupported: bool = option(
        True,
        "refuse fields that cannot be honoured; off: no effect, and answers name them",
        flag,
    )
    max_body_bytes: int = option(
        16 * 2**20, "largest request body in bytes", whole(1024, MAX_INT32)
    )
    max_queued_requests: int = option(
        1024, "requests without a first token; more are answered 503", whole(1, MAX_INT32)
    )
    max_hidden_state_values: int = option(
        2**20,
        "most numbers of hidden states that an answer may hold",
        whole(0, MAX_INT32),
    )
    max_routed_tokens: int = option(
        2**16, "most tokens whose experts an answer may hold", whole(0, MAX_INT32)
    )
    max_logprobs: int = option(20, "most logprobs per token that a request may ask", whole(0, 1024))
    max_prompts: int = option(1024, "most prompts, times n, of one request", whole(1, 65536))
    log_level: str = option("info", "debug, info, warning or error", one_of(*LOG_LEVELS))
    log_requests: bool = option(False, "a log line for each request, without its text", flag)
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector that gets a span a request, over HTTP",
        optional(text("URLs")),
    )
    drain_seconds: int = option(
        30, "how long requests may go on after SIGTERM", whole(0, MAX_INT32)
    )
    on_engine_death: str = option(
        "exit",
        "exit (for a supervisor to restart) or restart the engine",
        one_of("exit", "restart"),
    )
    stall_seconds: int = option(
        300, "silence of a busy engine after which requests are answered 503", whole(1, MAX_INT32)
    )
    ping_seconds: int = option(
        5, "silence of a stream after which it gets a comment line", whole(1, 3600)
    )
    template_seconds: int = option(
        10, "longest time for rendering the chat template of one request", whole(1, 3600)
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls: hermes, llama3_json, mistral, ...; none; auto: as its "
        "chat template shows",
        text("names"),
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks reasoning: think, deepseek_r1, mistral, ...; none; auto: as its chat "
        "template shows",
        text("names"),
    )
    stream_tool_arguments: bool = option(
        False, "show tool calls while they are written, also those that are cut off", flag
    )
    ssl_certfile: str | None = option(None, "certificate for https", _FILE)
    ssl_keyfile: str | None = option(None, "key of the certificate", _FILE)
    root_path: str | None = option(
        None, "path under which a proxy shows the server", optional(text("paths"))
    )
    cors_origins: str | None = option(
        None, "origins of web pages that may call, separated by commas; *: all", _NAMES
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            plain = entry.metadata["check"](entry.name, getattr(self, entry.name))
            object.__setattr__(self, entry.name, plain)  # once, while it is made
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_keyfile" if self.ssl_keyfile is None else "ssl_certfile"
            raise ConfigError(f"{missing} is not given", why="https needs certificate and key")
        if self.admin_api_key is not None and self.admin_api_key == self.api_key:
            raise ConfigError(
                "admin_api_key is the same as api_key", remedy="Use enable_admin, or another key"
            )
        for origin in names(self.cors_origins):
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins holds {origin!r}",
                    why="no browser calls a page's origin so",
                    remedy="Allowed: origins like https://example.com, separated by commas; or *",
                )

    @classmethod
    def field_help(cls) -> dict[str, str]:
        return {entry.name: entry.metadata["help"] for entry in fields(cls)}


def names(listed: str | None) -> tuple[str, ...]:
    """The parts of `a, b`."""
    return tuple(part.strip() for part in (listed or "").split(",") if part.strip())
