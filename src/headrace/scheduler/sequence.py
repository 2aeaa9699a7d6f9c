"""One continuation of a request, as the scheduler sees it.

    tokens known to the host   [ prompt ............ | output .... ]
    KV of processed steps      [ computed ........ ]
    KV of launched steps       [ length_bound ........... ]
    tokens with those in flight[ tokens + pending ................... ]

Without overlap the lower three coincide between steps, but for the newest token, whose KV the
next step writes.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.memory.radix_node import RadixNode
from headrace.request.outcome import Finished, Logprob
from headrace.request.packed_states import PackedStates
from headrace.request.request import Request
from headrace.sampling.host_mask import HostMask
from headrace.scheduler.token_rows import RoutingRows, StateRows

FloatArray = NDArray[np.floating[Any]]


class State(Enum):
    """WAITING for a row; RUNNING in a row; RETRACTING: leaves its row when the steps in flight
    are processed, then waits again; FINISHED."""

    WAITING = auto()
    RUNNING = auto()
    RETRACTING = auto()
    FINISHED = auto()


class TokenSink(Protocol):
    """Where the tokens of a sequence go."""

    def token(self, token_id: int, logprobs: dict[int, Logprob] | None) -> str | None:
        """Take one output token; return the stop string that it completes, if any."""

    def prompt_logprobs(self, entries: Seq[dict[int, Logprob] | None]) -> None:
        """Take the logprobs of the prompt, one entry per token, the first `None`."""

    def embedding(self, vector: NDArray[np.float32]) -> None:
        """Take the embedding of the prompt, before the ending."""

    def hidden_states(self, states: PackedStates) -> None:
        """Take the hidden states that were asked, before the ending."""

    def routed_experts(self, ids: NDArray[np.int32]) -> None:
        """Take the experts of the tokens, [rows, layers, chosen], where they were asked, before the
        ending."""

    def finished(self, ending: Finished) -> None:
        """Take the one ending."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """State of one continuation.

    Attributes:
        seed: settled 64-bit seed. stop_ids: ids that end it, the model's own included.
        tokens: prompt and processed output. max_length: length at which "length" ends it.
        row, pages, owned, node: place in the pools while scheduled; `owned` pages are its alone,
            the others belong to the prefix cache and are kept by the lock on `node`.
        length_bound: tokens with KV once all launched steps are done.
        pending: sampled tokens in flight. in_flight: launched steps not processed.
        sampled_here: it has sampled since it took its row, so its last token is on the device.
        computed: tokens with KV of processed, finite steps.
        proven_finite: the model has given it numbers since it took its row.
        mask_is_ready: its host mask, if it has one, can be asked.
        leader: first sequence of its request, whose prompt it takes from the prefix cache.
        prompt_entries: logprobs of the prompt, as far as it is scored.
        state_rows, routing_rows: hidden states and experts that its request asks for; `None` where
            it asks for none.
        canary_chain: tokens, and the KV canary's chain behind them.
        state_sum: [H] float64, sum of the hidden states of `computed` tokens, for a mean.
        queued: seconds of `time.perf_counter`. queue_seconds: from then to its first row; `None`
            until it has had one.
    """

    request: Request
    index: int
    seed: int
    stop_ids: frozenset[int]
    max_length: int
    sink: TokenSink
    host_mask: HostMask | None = None
    mask_is_ready: bool = True
    leader: "Sequence | None" = None
    tokens: list[int] = field(default_factory=list)
    state: State = State.WAITING
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)
    node: RadixNode | None = None
    length_bound: int = 0
    pending: int = 0
    in_flight: int = 0
    sampled_here: bool = False
    proven_finite: bool = False
    computed: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    arrival: int = 0
    queued: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None
    ending: Finished | None = None
    prompt_entries: list[dict[int, Logprob] | None] = field(default_factory=list)
    state_rows: StateRows | None = None
    routing_rows: RoutingRows | None = None
    canary_chain: tuple[int, int] = (-1, 0)
    state_sum: FloatArray | None = None
    paths: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.prompt_token_ids)

    @property
    def name(self) -> str:
        """Of the request, with its place where there are several: `request-3[1]`."""
        request_id = self.request.request_id
        return request_id if self.request.params.n == 1 else f"{request_id}[{self.index}]"

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def launched_length(self) -> int:
        """Tokens of the sequence, those in flight included."""
        return len(self.tokens) + self.pending

    @property
    def prefill_left(self) -> int:
        """Known tokens without KV; 0 once the sequence decodes."""
        return 0 if self.sampled_here else len(self.tokens) - self.length_bound

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The first sequence of a request scores the prompt for all of them, once."""
        asked = self.request.params.prompt_logprobs is not None and self.index == 0
        return asked and len(self.prompt_entries) < self.prompt_length

    @property
    def first_needed(self) -> int:
        """The first position that has to be computed for what it brings: a logprob, a state or the
        choice of experts."""
        pooling = self.request.pooling
        if self.wants_prompt_logprobs or (pooling is not None and pooling.pooling == "mean"):
            return 0
        kept = (self.state_rows, self.routing_rows)
        missing = [rows.next_position for rows in kept if rows is not None]
        return min([len(self.tokens) - 1, *missing])

    @property
    def can_decode(self) -> bool:
        """Another token may be launched now: not at its length, nothing the host must see first."""
        return (
            self.state is State.RUNNING
            and self.sampled_here
            and self.launched_length < self.max_length
            and not (
                self.pending and self.host_mask is not None and self.host_mask.needs_last_token
            )
        )

    @property
    def is_ready(self) -> bool:
        """A sequence waits for its grammar, and a later one of a request until the first one's
        prompt is in the cache."""
        if not self.mask_is_ready:
            return False
        leader = self.leader
        return leader is None or leader.proven_finite or leader.state is State.FINISHED

    def take_leaders_rows(self) -> None:
        """The rows of the prompt, but for its last token, are those of the first sequence."""
        leader, end = self.leader, self.prompt_length - 1
        if leader is None:
            return
        if self.state_rows is not None and leader.state_rows is not None:
            self.state_rows.take_prompt(leader.state_rows, end)
        if self.routing_rows is not None and leader.routing_rows is not None:
            self.routing_rows.take_prompt(leader.routing_rows, end)

    def took_path(self, path: str) -> None:
        """Extend the run-length record of the paths its steps took."""
        if self.paths and self.paths[-1][0] == path:
            self.paths[-1] = (path, self.paths[-1][1] + 1)
        else:
            self.paths.append((path, 1))
