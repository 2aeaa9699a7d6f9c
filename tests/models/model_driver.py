"""Runs a model over real pools and a real backend, without scheduler and runner."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.attention.backend import AttentionSetting
from headrace.attention.torch_native import TorchNativeBackend
from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.memory.arena import Arena
from headrace.memory.kv_pool import MHATokenToKVPool
from headrace.models.decoder import CausalDecoder


class Driver:
    """Sequences numbered from 0, each with pages of its own in shuffled order."""

    def __init__(
        self, model: CausalDecoder, *, max_length: int, sequences: int = 1, page_size: int = 16
    ) -> None:
        self.model, self.page_size = model, page_size
        traits = model.traits
        pages = -(-max_length // page_size)
        arena = Arena("cpu")
        self.tables: dict[str, Tensor] = {}
        self.backends: list[TorchNativeBackend] = []
        layers = model.attention_layers()
        dtype = next(model.parameters()).dtype
        for seed, group in enumerate(traits.kv_groups):
            pool = MHATokenToKVPool(
                arena,
                num_layers=len(group.layers),
                num_pages=1 + sequences * pages,
                page_size=page_size,
                num_kv_heads=traits.attention.num_kv_heads,
                head_dim=traits.attention.head_dim,
                v_head_dim=traits.attention.v_head_dim,
                dtype=dtype,
            )
            shuffled = torch.randperm(
                sequences * pages, generator=torch.Generator().manual_seed(seed)
            )
            self.tables[group.name] = (1 + shuffled).view(sequences, pages).to(torch.int32)
            setting = AttentionSetting(
                group=group,
                attention=traits.attention,
                page_size=page_size,
                max_sequences=sequences,
                max_model_len=max_length,
                dtype=dtype,
                device=arena.device,
            )
            backend = TorchNativeBackend(setting)
            self.backends.append(backend)
            for place, layer in enumerate(group.layers):
                layers[layer].bind(pool, backend, place)
        self.lengths = [0] * sequences

    def step(self, new: Mapping[int, Sequence[int]], *, decode: bool = False) -> list[Tensor]:
        """Append tokens to sequences; logits [L, V] of the new tokens of each."""
        batch, ids = self.batch(new, decode=decode)
        with torch.inference_mode():
            for backend in self.backends:
                backend.prepare_metadata(batch)
            hidden = self.model(ids, batch.positions, batch)
            logits = self.model.compute_logits(hidden)
        return list(logits.split([len(tokens) for tokens in new.values()]))

    def batch(
        self, new: Mapping[int, Sequence[int]], *, decode: bool = False
    ) -> tuple[ForwardBatch, Tensor]:
        rows = list(new)
        extend = [len(tokens) for tokens in new.values()]
        prefix = [self.lengths[row] for row in rows]
        totals = [before + more for before, more in zip(prefix, extend, strict=True)]
        for row, total in zip(rows, totals, strict=True):
            self.lengths[row] = total
        places = [torch.arange(before, total) for before, total in zip(prefix, totals, strict=True)]
        kv = {}
        for name, tables in self.tables.items():
            slots = [
                tables[row][place // self.page_size].long() * self.page_size
                + place % self.page_size
                for row, place in zip(rows, places, strict=True)
            ]
            kv[name] = KvGroup(
                name=name,
                page_size=self.page_size,
                page_table=tables[rows],
                out_cache_loc=torch.cat(slots),
            )
        mode = ForwardMode.DECODE if decode else ForwardMode.EXTEND
        ids = torch.tensor([token for tokens in new.values() for token in tokens])
        starts = [sum(extend[:index]) for index in range(len(extend))]
        whole = (
            {}
            if decode
            else {
                "extend_lens": torch.tensor(extend, dtype=torch.int32),
                "prefix_lens": torch.tensor(prefix, dtype=torch.int32),
                "extend_start": torch.tensor(starts, dtype=torch.int32),
            }
        )
        batch = ForwardBatch(
            mode=mode,
            rows=torch.tensor(rows) + 1,
            bounds=HostBounds(seq_lens=totals, extend_lens=extend),
            facts=BatchFacts(
                mode=mode,
                tokens=len(ids),
                live_tokens=len(ids),
                sequences=len(rows),
                max_length=max(totals),
                has_prefix=any(prefix),
            ),
            input_ids=ids,
            positions=torch.cat(places),
            seq_lens=torch.tensor(totals, dtype=torch.int32),
            kv=kv,
            **whole,
        )
        return batch, ids

    def idle(self) -> ForwardBatch:
        """A step without sequences, its metadata prepared."""
        none = torch.empty(0, dtype=torch.int64)
        kv = {
            name: KvGroup(
                name=name,
                page_size=self.page_size,
                page_table=tables[:0],
                out_cache_loc=none,
            )
            for name, tables in self.tables.items()
        }
        batch = ForwardBatch(
            mode=ForwardMode.IDLE,
            rows=none,
            bounds=HostBounds(seq_lens=[], extend_lens=[]),
            facts=BatchFacts(
                mode=ForwardMode.IDLE, tokens=0, live_tokens=0, sequences=0, max_length=0
            ),
            kv=kv,
        )
        for backend in self.backends:
            backend.prepare_metadata(batch)
        return batch

    def whole(self, *prompts: Sequence[int]) -> list[Tensor]:
        """Each prompt in one step, all of them together: logits [L, V] each."""
        self.lengths = [0] * len(self.lengths)
        return self.step(dict(enumerate(prompts)))

    def decoded(self, *prompts: Sequence[int], tail: int) -> list[Tensor]:
        """Logits [L, V] with up to `tail` last tokens of each prompt in decode steps."""
        cuts = [max(1, len(prompt) - tail) for prompt in prompts]
        whole = self.whole(*[prompt[:cut] for prompt, cut in zip(prompts, cuts, strict=True)])
        parts = [[logits] for logits in whole]
        for offset in range(tail):
            new = {
                row: prompt[cut + offset : cut + offset + 1]
                for row, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True))
                if cut + offset < len(prompt)
            }
            if new:
                for row, logits in zip(new, self.step(new, decode=True), strict=True):
                    parts[row].append(logits)
        return [torch.cat(part) for part in parts]
