"""The batch-invariant Triton kernel as a backend: what `triton` is in deterministic mode.

Every row goes through one kernel, whose results do not depend on what else is in the step, on
chunks, or on the path. Rows with one new token, which would each occupy a program of a prompt, are
spread over several programs; that changes no bit either.

Importing this file needs no Triton; the kernel is imported when a backend is made.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.attention.registry import register_attention_backend
from headrace.attention.triton_backend import TritonBackend, decode_rows, parts_of
from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import Bucket
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.protocols import AttentionLayer
from headrace.config.hardware import Hardware
from headrace.kernels.invariant_splits import SplitScratch, most_splits, runs_of
from headrace.kernels.support_triton import has_dependent_launch, triton_available


@register_attention_backend("triton")
class TritonDeterministicBackend(AttentionBackend):
    """Reads pages where they lie, always: fresh keys and values are those of the pool.

    On a CPU only Triton's interpreter runs the kernel, which serves tests.
    """

    capabilities: ClassVar = replace(TritonBackend.capabilities, deterministic=True)

    def __init__(self, setting: AttentionSetting) -> None:
        """Raises `UnsupportedError` where the kernel cannot run on the device."""
        super().__init__(setting)
        if missing := triton_available(self.device.type):
            raise UnsupportedError(
                f"Attention backend triton cannot run on {self.device.type}",
                why=missing.reason,
                remedy=missing.remedy,
            )
        room = "headrace.kernels.invariant_attention_triton"
        self._attention: Any = import_module(room).InvariantAttention
        self._layers: dict[tuple[Any, ...], tuple[Any, tuple[Tensor, Tensor | None]]] = {}
        self._pdl = has_dependent_launch(self.device)
        self._tables_ready = False
        self._decode_rows = 0  # leading rows of a mixed step with one new token each
        self._front: tuple[Tensor, ...] = ()  # their page table and lengths
        self._behind: tuple[Tensor, ...] = ()  # of the others: page table, start, extend, prefix
        self._max_seq_len = self._max_extend = 0
        self._covered = 0  # leading tokens of a step that belong to rows
        self._runs = 1
        self._scratch: SplitScratch | None = None  # of this step
        self._eager: SplitScratch | None = None
        self._captured: list[SplitScratch] = []

    @classmethod
    def unavailable(cls, hardware: Hardware) -> Refusal | None:
        return TritonBackend.unavailable(hardware)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        rows = decode_rows(batch)
        self._decode_rows, self._tables_ready = rows, False
        self._front, self._behind = parts_of(batch, self.group.name, rows)
        self._max_seq_len = max(batch.bounds.seq_lens[:rows], default=1)
        self._max_extend = max(batch.bounds.extend_lens[rows:], default=0)
        self._covered = sum(batch.bounds.extend_lens)
        need = self._need(rows, self._max_seq_len)
        self._runs = self._runs_of(need)
        if self._runs > 1 and not (self._eager and self._eager.holds(**need)):
            self._eager = SplitScratch.allocate(**need, device=self.device)
        self._scratch = self._eager

    def prepare_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The graph serves every length: programs find their splits by the lengths on the device.

        Between the graph's preparation and the first layer lies the embedding, which is launched
        without dependent launch: the tables are complete before any layer starts.
        """
        self._max_seq_len, self._tables_ready = self.max_model_len, True
        self._front, self._behind = parts_of(batch, self.group.name, batch.num_sequences)
        self._runs = self._runs_of(self._need(batch.num_sequences, self.max_model_len))
        self._scratch = self._captured[-1] if self._runs > 1 else None

    def capture_buffers(self, bucket: Bucket) -> None:
        """Scratch of the splits of `bucket`; graphs share it, since their layers follow each other.

        Scratch that an earlier graph holds is kept as long as the backend.
        """
        need = self._need(bucket.sequences, self.max_model_len)
        kept = self._captured and self._captured[-1].holds(**need)
        if self._runs_of(need) > 1 and not kept:
            self._captured.append(SplitScratch.allocate(**need, device=self.device))

    def _need(self, rows: int, max_seq_len: int) -> dict[str, int]:
        """Sizes of the scratch of a decode."""
        return {
            "batch": rows,
            "heads": self.attention.num_heads,
            "splits": most_splits(max_seq_len, window=self.group.window),
            "value_dim": self.attention.v_head_dim,
        }

    def _runs_of(self, need: dict[str, int]) -> int:
        kv_heads = self.attention.num_kv_heads
        return runs_of(batch=need["batch"], kv_heads=kv_heads, splits=need["splits"])

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
        """As `AttentionBackend.forward`; padding past the last row is left as it is in `out`."""
        attention = self._of_layer(q, layer)
        rows = self._decode_rows
        if out is None:
            out = q.new_empty(*q.shape[:2], layer.v_head_dim)
            if batch.extend_start is not None:
                out[self._covered :] = 0
        if batch.extend_start is None:
            rows = q.shape[0]
        if rows > 0:
            attention.decode(
                q[:rows],
                *self._front,
                out=out[:rows],
                lse=None if lse is None else lse[:rows],
                max_seq_len=self._max_seq_len,
                runs=self._runs,
                scratch=self._scratch,
                tables_ready=self._tables_ready,
            )
        if batch.extend_start is not None:
            attention.extend(
                q,
                *self._behind,
                max_extend=self._max_extend,
                out=out,
                lse=lse,
                covered=self._covered,
            )
        return out

    def _of_layer(self, q: Tensor, layer: AttentionLayer) -> Any:
        """The kernel that knows the layer's pool and habits, made at its first call."""
        keys, values = layer.pool.key_value(layer.pool_layer)
        sinks = layer.sinks
        known = (id(keys), layer.scale, layer.window, layer.soft_cap, id(sinks))
        found = self._layers.get(known)
        if found is None:
            attention = self._attention(
                q,
                keys,
                values,
                scale=layer.scale,
                window=layer.window,
                soft_cap=layer.soft_cap,
                sinks=sinks,
                pdl=self._pdl,
            )
            found = self._layers[known] = attention, (keys, sinks)  # kept, as their ids name them
        return found[0]
