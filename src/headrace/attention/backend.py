"""The contract of an attention backend."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headrace.attention.capabilities import AttentionCapabilities, AttentionNeed, refusals
from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import AttentionLayer
from headrace.config.hardware import Hardware
from headrace.config.persona import AttentionTraits, KvGroupTraits, ModelTraits
from headrace.config.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetting:
    """What a backend is made for.

    Attributes:
        group: the KV group it serves.
        attention: head counts (of this rank) and habits of the model's layers.
        page_size: tokens a page.
        max_sequences: bound on B. max_model_len: bound on the lengths, in tokens.
        dtype: of the queries.
    """

    group: KvGroupTraits
    attention: AttentionTraits
    page_size: int
    max_sequences: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, plan: Plan, traits: ModelTraits, group: KvGroupTraits) -> "AttentionSetting":
        """That of a group of the model's layers under a plan."""
        return cls(
            group=group,
            attention=traits.attention,
            page_size=plan.page_size.value,
            max_sequences=plan.max_running_requests.value,
            max_model_len=plan.max_model_len.value,
            dtype=getattr(torch, plan.dtype.value),
            device=torch.device(plan.device.value),
        )


class AttentionBackend(ABC):
    """Attention of the layers of one KV group over the pages of that group's pool.

    The layer has written the new keys and values before it calls `forward`; a backend only reads:
    the pool, `batch.kv[group]`, the lengths on the device and the host's `batch.bounds`. Masks come
    from the lengths on the device, sizes from the bounds: a row that a stop token has ended may be
    shorter on the device than the host believes, and its result is ignored.

    A step: `prepare_metadata` once, then `forward` for each layer of the group. In a captured
    graph: `capture_buffers` once per bucket before the capture, then `prepare_metadata_in_graph`
    and the layers inside it.
    """

    name: ClassVar[str]
    capabilities: ClassVar[AttentionCapabilities]

    def __init__(self, setting: AttentionSetting) -> None:
        self.setting = setting
        self.group, self.attention = setting.group, setting.attention
        self.page_size, self.max_model_len = setting.page_size, setting.max_model_len
        self.dtype, self.device = setting.dtype, setting.device

    @classmethod
    def unavailable(cls, hardware: Hardware) -> Refusal | None:
        """Why the packages it needs are not there on `hardware`; `None` when they are."""
        return None

    @classmethod
    def refusals(cls, need: AttentionNeed, hardware: Hardware) -> list[Refusal]:
        """Every reason why this class cannot serve `need` on `hardware`."""
        found = refusals(cls.name, cls.capabilities, need, hardware)
        missing = cls.unavailable(hardware) if cls.capabilities.run_on(hardware) else None
        return found if missing is None else [*found, missing]

    @abstractmethod
    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Work shared by the layers of a step; outside graphs, sees the host's bounds."""

    def prepare_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The same with device operations only, recorded into a graph.

        Raises:
            UnsupportedError: the capabilities say that this backend is in no graph.
        """
        raise self._in_no_graph()

    def capture_buffers(self, bucket: Bucket) -> None:
        """Allocate what the kernels of a graph of `bucket` keep using; their addresses stay.

        Raises:
            UnsupportedError: the capabilities say that this backend is in no graph.
        """
        raise self._in_no_graph()

    def _in_no_graph(self) -> UnsupportedError:
        return UnsupportedError(
            f"Attention backend {self.name} cannot be captured into a graph",
            why="its capabilities have no graph",
            remedy="Run it in the eager path",
        )

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        *,
        kv: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's new tokens.

        Args:
            q: [T, N, D], rotated.
            layer: shape, scale, window, soft cap, sinks and pool of the layer.
            kv: fresh k [T, K, D] and v [T, K, Dv] of a prefill whose rows have no prefix; a backend
                may take them instead of the pool.
            out: [T, N, Dv] contiguous, written and returned; allocated if absent.
            lse: [T, N] float32, written if given: natural log of the sum of exponentials, sinks
                included, -inf where a token sees nothing.

        Returns: [T, N, Dv] in q's dtype. Tokens that see nothing (padding, ended rows) may be
            0 or left unwritten in a given `out`; they are never NaN in a new one.
        """
