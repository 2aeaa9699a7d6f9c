"""From a request to its sequences."""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from headrace.config.persona import ModelTraits
from headrace.kernels.noise import derive_seed
from headrace.request.request import Request
from headrace.sampling.host_mask import HostMask
from headrace.scheduler.sequence import Sequence, TokenSink
from headrace.scheduler.token_rows import routing_rows_of, state_rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One sequence of a request, as the engine hands it over."""

    sink: TokenSink
    host_mask: HostMask | None = None


class Admissions:
    """Makes sequences, each with a seed and a place in the order of arrival.

    Args:
        seed: of the seeds that are drawn for requests that name none.
        traits: of the model. dtype: of its states.
    """

    def __init__(self, seed: int, traits: ModelTraits, dtype: torch.dtype) -> None:
        self._seeds = random.Random(seed)
        self._traits, self._dtype = traits, dtype
        self._arrivals = 0

    def sequences_of(
        self,
        request: Request,
        max_tokens: int,
        stop_ids: frozenset[int],
        admissions: Seq[Admission],
    ) -> list[Sequence]:
        """The first one leads: the others wait until its prompt is in the prefix cache."""
        seed = self._seed_of(request)
        group: list[Sequence] = []
        for index, admission in enumerate(admissions):
            group.append(
                Sequence(
                    request=request,
                    index=index,
                    seed=derive_seed(seed, index),
                    stop_ids=stop_ids,
                    max_length=len(request.prompt_token_ids) + max_tokens,
                    sink=admission.sink,
                    host_mask=admission.host_mask,
                    mask_is_ready=admission.host_mask is None,
                    leader=group[0] if group else None,
                    state_rows=state_rows_of(request, self._traits, self._dtype),
                    routing_rows=routing_rows_of(request, self._traits),
                    arrival=self._arrivals,
                )
            )
            self._arrivals += 1
        return group

    def _seed_of(self, request: Request) -> int:
        if request.pooling is not None:
            return 0  # nothing is sampled, so nothing is drawn
        seed = request.params.seed
        return self._seeds.getrandbits(63) if seed is None else seed
