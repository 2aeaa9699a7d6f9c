"""A request as the engine takes it: token ids in, sampling options, who asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with its options; it becomes `params.n` sequences.

    With `pooling` it becomes one sequence that ends in an embedding and makes no token; `params`
    are the defaults then.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: the prompt, already tokenised.
        priority: higher runs first; equal priorities in order of arrival.
        cache_salt: requests share cached prefixes only within one salt.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None
    pooling: PoolingParams | None = None
