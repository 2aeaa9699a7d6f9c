"""Two backends as one: one for decode steps, one for all others."""

from typing import ClassVar

from torch import Tensor

from headrace.attention.backend import AttentionBackend
from headrace.attention.capabilities import AttentionCapabilities
from headrace.batch.facts import Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import AttentionLayer


class HybridAttentionBackend(AttentionBackend):
    """Composes a prefill and a decode backend; mixed steps go to the prefill one.

    It is not in the registry: it is what two names together mean. What it can do is said by its
    parts, each in its phase; only decode is captured into graphs whole, so graphs ask that part.
    """

    name: ClassVar[str] = "hybrid"
    capabilities: ClassVar[AttentionCapabilities]

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        assert prefill.group == decode.group, "the parts serve one KV group"
        super().__init__(decode.setting)
        self.prefill, self.decode = prefill, decode

    def part(self, batch: ForwardBatch) -> AttentionBackend:
        return self.decode if batch.mode.is_decode else self.prefill

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        self.part(batch).prepare_metadata(batch)

    def prepare_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.part(batch).prepare_metadata_in_graph(batch)

    def capture_buffers(self, bucket: Bucket) -> None:
        self.decode.capture_buffers(bucket)

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
        return self.part(batch).forward(q, layer, batch, kv=kv, out=out, lse=lse)
