"""verify --deep names the path, the step, the layer and the position of planted faults.

Each fault is what goes wrong in engines: in one path, one page size, one kind of step. They are put
into the engine from outside; the reference, which has pages of 32 tokens and one row, is spared.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.attention import torch_native
from headrace.attention.torch_native import TorchNativeBackend
from headrace.config.engine_config import EngineConfig
from headrace.execution import cpu_graph
from headrace.execution.preparation import BatchPreparation
from headrace.layers.cpu_operators import CpuOperators
from headrace.memory.radix_cache import RadixCache
from headrace.models.decoder import CausalDecoder
from headrace.runner.model_runner import ModelRunner
from headrace.scheduler import launch
from headrace.testing.reference import PAGE_SIZE as REFERENCE_PAGE
from headrace.testing.verify import verify
from headrace.testing.verify_report import VerifyReport

# A window is 16 tokens; pages are crossed in prompts and in outputs.
PROMPTS = [
    [(7 * place + 31 * index) % 250 for place in range(length)]
    for index, length in enumerate((62, 61, 33, 15))
]
PROMPTS[1][:40] = PROMPTS[0][:40]

Patch = pytest.MonkeyPatch


# Whose norms hardly notice their eps, unless it is large, and whose blocks add by `add_linear`.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-2,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}


def engine_only(backend_or_preparation: Any) -> bool:
    """Not the reference, which must stay right."""
    size = getattr(backend_or_preparation, "page_size", None)
    return (size or backend_or_preparation._page_size) != REFERENCE_PAGE


def after_fill(patch: Patch, change: Callable[[BatchPreparation, Any], None]) -> None:
    original = BatchPreparation.fill

    def fill(self: BatchPreparation, batch: Any) -> None:
        original(self, batch)
        if engine_only(self):
            change(self, batch)

    patch.setattr(BatchPreparation, "fill", fill)


def rope_off_by_one_in_decode(patch: Patch) -> None:
    def shift(preparation: BatchPreparation, batch: Any) -> None:
        if batch.mode.is_decode:
            batch.positions = batch.positions + 1

    after_fill(patch, shift)


def last_page_tail_read(patch: Patch) -> None:
    """Attention of decode steps reads one slot too many in pages of 64."""
    original = torch_native.make_tiles

    def make_tiles(batch: Any, group: str, **rest: Any) -> Any:
        if batch.kv[group].page_size == 64 and batch.mode.is_decode:
            lengths = [length + 1 for length in batch.bounds.seq_lens]
            batch = replace(
                batch,
                bounds=replace(batch.bounds, seq_lens=lengths),
                seq_lens=batch.seq_lens + 1,
            )
        return original(batch, group, **rest)

    patch.setattr(torch_native, "make_tiles", make_tiles)


def padding_row_read(patch: Patch) -> None:
    """Layer 1 of steps of several rows sees the first row's queries answered by page 0."""
    original = TorchNativeBackend.forward

    def forward(self: Any, q: Tensor, layer: Any, batch: Any, **given: Any) -> Tensor:
        table = None
        group = batch.kv[layer.kv_group]
        if layer.layer_id == 1 and batch.mode.is_decode and batch.num_sequences > 1:
            table = group.page_table.clone()
            group.page_table[0, 0] = 0
            self._tiles = {}
        out = original(self, q, layer, batch, **given)
        if table is not None:
            group.page_table.copy_(table)
            self._tiles = {}
        return out

    patch.setattr(TorchNativeBackend, "forward", forward)


def slot_wrong_at_a_chunk_border(patch: Patch) -> None:
    """The first token of a later chunk is written where the last of the chunk before was."""

    def shift(preparation: BatchPreparation, batch: Any) -> None:
        if batch.mode.is_decode or batch.bounds.prefix_lens[0] == 0:
            return
        for group in batch.kv.values():
            group.out_cache_loc[0] -= 1

    after_fill(patch, shift)


def window_edge_off_by_one(patch: Patch) -> None:
    """In the last layer alone, whose keys and values know nothing of it."""
    original = TorchNativeBackend.forward

    def forward(self: Any, q: Tensor, layer: Any, batch: Any, **given: Any) -> Tensor:
        if layer.layer_id != 2 or not engine_only(self):
            return original(self, q, layer, batch, **given)
        window = layer.window
        layer.window = window - 1
        try:
            return original(self, q, layer, batch, **given)
        finally:
            layer.window = window

    patch.setattr(TorchNativeBackend, "forward", forward)


def norm_without_eps(patch: Patch) -> None:
    """In the operators that fuse, which the reference does not use."""

    def norm(self: CpuOperators, norm: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, norm.shape, norm.weight, 0.0)

    patch.setattr(CpuOperators, "norm", norm)


def residual_twice_in_small_batches(patch: Patch) -> None:
    """By the MLP of any layer, where a step has fewer than four tokens."""
    original = CpuOperators.add_linear

    def add_linear(self: CpuOperators, linear: Any, x: Tensor, residual: Tensor) -> Tensor:
        out = original(self, linear, x, residual)
        return out + residual if x.shape[0] < 4 else out

    patch.setattr(CpuOperators, "add_linear", add_linear)


def prefix_shifted_by_one_page(patch: Patch) -> None:
    original = RadixCache.match

    def match(self: RadixCache, *given: Any) -> Any:
        found = original(self, *given)
        return replace(found, pages=[*found.pages[1:], *found.pages[:1]])

    patch.setattr(RadixCache, "match", match)


def counts_lost_in_retraction(patch: Patch) -> None:
    original = launch.row_start

    def row_start(sequence: Any) -> Any:
        start = original(sequence)
        return replace(start, prompt_length=len(start.tokens)) if sequence.retractions else start

    patch.setattr(launch, "row_start", row_start)


def seed_lost_in_retraction(patch: Patch) -> None:
    original = launch.row_start

    def row_start(sequence: Any) -> Any:
        start = original(sequence)
        return replace(start, seed=start.seed + 1) if sequence.retractions else start

    patch.setattr(launch, "row_start", row_start)


def token_of_the_wrong_row(patch: Patch) -> None:
    """With overlap, two rows swap the tokens that they go on with."""
    original = ModelRunner.sample

    def sample(self: ModelRunner, logits: Any, batch: Any) -> Any:
        output = original(self, logits, batch)
        if self.plan.overlap.value and batch.mode.is_decode and batch.num_sequences > 1:
            last = self.rows.last_token
            pair = batch.rows[:2]
            last[pair] = last[pair.flip(0)]
        return output

    patch.setattr(ModelRunner, "sample", sample)


def another_row_writes_over_it(patch: Patch) -> None:
    """In decode steps the second row writes to the first slot of the first row too."""

    def clash(preparation: BatchPreparation, batch: Any) -> None:
        if not batch.mode.is_decode or batch.num_sequences < 2:
            return
        for group in batch.kv.values():
            group.out_cache_loc[1] = group.page_table[0, 0].long() * group.page_size

    after_fill(patch, clash)


def hidden_of_the_wrong_row(patch: Patch) -> None:
    """In steps of three rows the head sees them in another order."""
    original = CausalDecoder.compute_logits

    def compute_logits(self: CausalDecoder, hidden: Tensor) -> Tensor:
        return original(self, hidden.roll(1, 0) if hidden.shape[0] == 3 else hidden)

    patch.setattr(CausalDecoder, "compute_logits", compute_logits)


def padding_written_over_a_live_slot(patch: Patch) -> None:
    """Compiled decode steps are padded with token 0, written to the first row's slot."""
    patch.setattr("headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph)
    groups, calls = 2, count()

    def pad(x: Tensor, by: tuple[int, ...]) -> Tensor:
        is_slots = len(by) == 2 and next(calls) % (2 + groups) >= 2
        return torch.cat((x, x[:1].expand(by[1]))) if is_slots else F.pad(x, by)

    patch.setattr(cpu_graph, "F", SimpleNamespace(pad=pad))


@dataclass(frozen=True)
class Fault:
    """What is planted; which settings vary or differ; what all failing configurations have in
    common ("" where all fail); what is said of the first one, and the layer of its first wrong key
    or value (`None`: all are right)."""

    plant: Callable[[Patch], None]
    settings: dict[str, Any]
    common: str
    says: str
    layer: int | None
    family: str = "gemma"
    path: str = "eager"
    some_pass: bool = False
    looks: int = 1  # at so many configurations that fail


VARIES = None
FIXED = {
    "page_size": 16,
    "chunked_prefill_size": 64,
    "enable_prefix_cache": False,
    "enable_overlap": False,
}
FAULTS = {
    "rope position off by one in decode": Fault(
        rope_off_by_one_in_decode, {}, "", "keys alone: the position", 0
    ),
    "tail of the last page read": Fault(
        last_page_tail_read, {"page_size": VARIES}, "page size 64", "layer 0 went wrong", 1
    ),
    "padding page read": Fault(padding_row_read, {}, "", "layer 1 went wrong", 2),
    "wrong slot at the border of chunks": Fault(
        slot_wrong_at_a_chunk_border, {"chunked_prefill_size": 29}, "", "written over it", 0
    ),
    "window edge in the last layer": Fault(
        window_edge_off_by_one, {}, "", "attention or MLP of layer 2, or the last norm", None
    ),
    "norm without eps": Fault(norm_without_eps, {}, "", "layer 0, position 0", 0, "llama"),
    "residual added twice in small batches": Fault(
        residual_twice_in_small_batches, {}, "retraction off", "layer 0 went wrong", 1, "llama"
    ),
    "cached prefix shifted by a page": Fault(
        prefix_shifted_by_one_page,
        {"enable_prefix_cache": True},
        "",  # caches that are cold at first are shifted too, once a retracted sequence comes back
        "prefix cache gave a wrong page",
        0,
        some_pass=True,
        looks=8,
    ),
    "counts lost in a retraction": Fault(
        counts_lost_in_retraction, {}, "retraction on", "what differs is sampling", None
    ),
    "seed lost in a retraction": Fault(
        seed_lost_in_retraction, {}, "retraction on", "what differs is sampling", None
    ),
    "token of the wrong row with overlap": Fault(
        token_of_the_wrong_row, {"enable_overlap": VARIES}, "overlap on", "wrong from the start", 0
    ),
    "another row writes over a slot": Fault(
        another_row_writes_over_it, {}, "", "something else has written over it", 0
    ),
    "padding written over a live slot": Fault(
        padding_written_over_a_live_slot,
        {"cpu_graph": "on"},
        "path cpu_graph and retraction off",  # retraction leaves no step of three rows
        "the slot it was written to",
        0,
        path="cpu_graph",
    ),
    "hidden states of the wrong rows": Fault(
        hidden_of_the_wrong_row, {}, "", "the states behind them: the head, or the row", None
    ),
}


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("verify_faults") / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


# Those that vary a setting take more configurations.
SLOW = {name for name, fault in FAULTS.items() if VARIES in fault.settings.values()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS]
)
def test_a_fault_is_found_with_its_path_and_layer(
    name: str, model: str, llama: str, monkeypatch: Patch
) -> None:
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    monkeypatch.setattr("headrace.testing.verify.DEEP_MOST", fault.looks)
    report = report_of(llama if fault.family == "llama" else model, **fault.settings)
    assert report.failed
    assert report.common == fault.common
    assert (len(report.failed) < len(report.results)) == (fault.some_pass or bool(fault.common))
    found = next(each.deep for each in report.failed if fault.says in str(each.deep))
    assert found is not None
    assert found.layer == fault.layer
    assert f", {fault.path}, " in found.step
    assert str(found) in str(report)
    if fault.looks < len(report.failed):
        assert report.failed[-1].deep is None


def report_of(folder: str, **settings: Any) -> VerifyReport:
    options = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "cpu_graph": "off",
        "seed": 3,
        **FIXED,
        **settings,
    }
    given = {key: value for key, value in options.items() if value is not VARIES}
    return verify(EngineConfig(model=folder, **given), prompts=PROMPTS, deep=True)
