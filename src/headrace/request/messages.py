"""What the face and the engine's process say to each other: msgspec structs, tagged, in msgpack.

To the engine: `Submit`, `Abort`, `Control`, `Stop`. From it: `Hello`, `Ready` or `StartFailed`,
then `Turn`, `Refused`, `ControlReply`, `Draining`. A turn of the engine is one message, however
many requests it moved. Structs are arrays on the wire: a field goes in at the end, with a default.
"""

from typing import Any

import msgspec

from headrace.base import errors
from headrace.base.errors import HeadraceError
from headrace.request.outcome import Finished, Logprob
from headrace.request.packed_states import PackedStates
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams

TokenLogprobs = dict[int, Logprob]


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """A `HeadraceError` on its way: the name of its type and its three parts."""

    kind: str
    what: str
    why: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, error: HeadraceError) -> "Failure":
        return cls(type(error).__name__, error.what, error.why, error.remedy)

    def error(self) -> HeadraceError:
        """The very error that was raised on the other side."""
        kind: type[HeadraceError] = getattr(errors, self.kind)
        return kind(self.what, why=self.why, remedy=self.remedy)


# ---- to the engine


class Submit(msgspec.Struct, array_like=True, tag="submit", kw_only=True):
    """Queue a request.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_text: the prompt as text, where the face has it.
        default_max_tokens: used where `params.max_tokens` is `None`; `None`: the rest of the
            context.
        priority, cache_salt: see `Request`.
        pooling: make an embedding and no token; `params` stay at their defaults.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = SamplingParams()
    prompt_text: str | None = None
    default_max_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    pooling: PoolingParams | None = None


class SubmitHead(msgspec.Struct, array_like=True, tag="submit", kw_only=True):
    """The beginning of a `Submit`, to answer one whose rest cannot be read."""

    request_id: str


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """End requests. Unknown and ended ones are left alone."""

    request_ids: list[str]


class Control(msgspec.Struct, array_like=True, tag="control"):
    """Call something by name; answered by one `ControlReply` with the same `call_id`."""

    call_id: int
    name: str
    arguments: dict[str, Any]


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """Take nothing new, let what runs end for so many seconds, abort the rest, and go."""

    drain_seconds: float


ToEngine = Submit | Abort | Control | Stop


# ---- from the engine


class EngineInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What a face must know of an engine that is ready.

    Attributes:
        model: as asked; model_path: where its files lie.
        summary: one line: device, dtype, attention, graphs. sampling_defaults: the line of that.
        eos_token_ids: ids that end a sequence by themselves, sorted.
        default_params: options of a request that names none.
        is_generation: it makes text (and not only embeddings).
        kv_tokens: capacity of the KV pool. has_tokenizer: False for a checkpoint of ids alone.
        num_layers, hidden_size: which hidden states there are.
        start_seconds: from the start of the process to ready.
    """

    model: str
    model_path: str
    summary: str
    architecture: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    num_layers: int
    hidden_size: int
    eos_token_ids: list[int]
    default_params: SamplingParams
    sampling_defaults: str
    is_generation: bool
    has_tokenizer: bool
    kv_tokens: int
    page_size: int
    max_running_requests: int
    start_seconds: float
    pid: int


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The engine's process is there and connected; the model comes next."""

    pid: int


class Load(msgspec.Struct, array_like=True, frozen=True):
    """How busy the engine is: sequences that run and wait, pages of the KV pool, and what it has
    done since its start.

    Attributes:
        pages_cached: in the prefix cache. pages_evictable: those of them that nobody reads.
        prompt_tokens: of sequences when they first ran. cached_tokens: those of them that the
            prefix cache held. output_tokens: sampled and taken.
        kv_canary_violations: slots and fed tokens that the KV canary found wrong.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_evictable: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    kv_canary_violations: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that running sequences hold, 0 to 1; what only the prefix cache
        holds can be had at once and does not count."""
        used = self.pages_total - self.pages_free - self.pages_evictable
        return used / self.pages_total if self.pages_total else 0.0


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    info: EngineInfo
    load: Load = Load()


class StartFailed(msgspec.Struct, array_like=True, tag="start_failed"):
    failure: Failure


class Delta(msgspec.Struct, array_like=True):
    """What is new of one continuation of a request.

    The first one of a request says that it was accepted, and may hold nothing else.

    Attributes:
        index: which of the request's n continuations.
        text: may be empty while characters or stop strings are incomplete.
        logprobs: an entry per token, id -> Logprob; `None` when not asked.
        prompt_logprobs: an entry per prompt token, the first `None`; comes once, with index 0.
        finished: the one ending of this continuation, with its last delta.
        prompt_tokens: length of the prompt. cached_tokens: those taken from the prefix cache, known
            with the first token.
        paths: forward paths its steps took, run-length: [(path, steps), ...]; with `finished`.
        queue_seconds: from the queue to its first step, by the engine's clock; with `finished`,
            `None` for one that never ran.
        embedding: float32 numbers, little-endian, of a request with `pooling`; with `finished`.
        hidden_states: all that the request asked for; with `finished`.
        routed_experts: little-endian int32 of every token, [rows, layers with experts, k], where it
            was asked; with `finished`.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: Finished | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    paths: list[tuple[str, int]] = []
    queue_seconds: float | None = None
    embedding: bytes | None = None
    hidden_states: PackedStates | None = None
    routed_experts: bytes | None = None


class Turn(msgspec.Struct, array_like=True, tag="turn"):
    """News of all requests since the message before."""

    deltas: list[Delta]
    load: Load


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """A request that was not taken; nothing of it ran, and nothing else comes."""

    request_id: str
    failure: Failure


class ControlReply(msgspec.Struct, array_like=True, tag="reply"):
    """The result of a `Control`, or why there is none."""

    call_id: int
    result: dict[str, Any] | None = None
    failure: Failure | None = None


class Draining(msgspec.Struct, array_like=True, tag="draining"):
    """The engine takes nothing new and will end: it was asked to stop, here or by a signal."""


FromEngine = Hello | Ready | StartFailed | Turn | Refused | ControlReply | Draining
