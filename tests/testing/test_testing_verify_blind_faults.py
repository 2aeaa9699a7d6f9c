"""verify --deep against faults that were planted by somebody who had not seen how it looks.

They are of one phase, one layer, one kind of step or one class of operators, some of them small.
What must be named is the path, the layer, and what the failing configurations have in common.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.attention import torch_native
from headrace.attention.torch_native import TorchNativeBackend
from headrace.batch.rows import Rows
from headrace.config.engine_config import EngineConfig
from headrace.execution.compiled_pieces import CompiledForward
from headrace.execution.preparation import BatchPreparation
from headrace.layers.attention import SelfAttention
from headrace.layers.cpu_operators import CpuOperators
from headrace.layers.operators import TorchOperators
from headrace.layers.rope import Rotation
from headrace.runner import forward_paths
from headrace.runner.model_runner import ModelRunner
from headrace.scheduler.batch_builder import BatchBuilder
from headrace.scheduler.page_keeper import PageKeeper
from headrace.testing.verify import verify

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 2.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
}
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "gemma3": GEMMA3}


def queries_of_decode_turned_too_little(patch: Patch) -> None:
    """Layer 2, decode of several rows: queries are turned as those of position 1."""
    original = TorchOperators.rotate_and_write

    def turn(
        self: Any, attention: Any, qkv: Tensor, rotation: Any, batch: Any
    ) -> tuple[Tensor, Any]:
        q, fresh = original(self, attention, qkv, rotation, batch)
        if attention.layer_id == 2 and batch.mode.is_decode and len(qkv) >= 2:
            q = Rotation(rotation.cache, torch.ones_like(rotation.positions)).apply(q)
        return q, fresh

    patch.setattr(TorchOperators, "rotate_and_write", turn)


def chunk_border_inside_a_page(patch: Patch) -> None:
    """The first token of a chunk that begins inside a page goes to the slot before its own."""
    original = BatchPreparation._fill_extend

    def fill(self: Any, batch: Any, tokens: Tensor) -> None:
        original(self, batch, tokens)
        lengths = zip(batch.bounds.seq_lens, batch.bounds.extend_lens, strict=True)
        for place, (total, new) in enumerate(lengths):
            if new > 1 and (total - new) % self._page_size:
                for group in batch.kv.values():
                    group.out_cache_loc[int(batch.extend_start[place])] -= 1

    patch.setattr(BatchPreparation, "_fill_extend", fill)


def after_taking_a_row(patch: Patch, change: Callable[[PageKeeper, Any], None]) -> None:
    original = PageKeeper.take_row

    def take_row(self: PageKeeper, sequence: Any, headroom: int) -> bool:
        taken = original(self, sequence, headroom)
        if taken:
            change(self, sequence)
        return taken

    patch.setattr(PageKeeper, "take_row", take_row)


def table_of_the_resumed(patch: Patch) -> None:
    """The table of a resumed sequence names its first page twice."""

    def stage(keeper: PageKeeper, sequence: Any) -> None:
        if sequence.retractions and len(sequence.pages) > 1:
            keeper.rows.stage(sequence.row, 1, sequence.pages[:1])

    after_taking_a_row(patch, stage)


def table_of_a_cached_prefix(patch: Patch) -> None:
    """The table names the last but one page of a cached prefix in place of its last, too."""

    def stage(keeper: PageKeeper, sequence: Any) -> None:
        pages = sequence.computed // keeper.page_size
        if pages >= 2 and not sequence.retractions:
            keeper.rows.stage(sequence.row, pages - 1, sequence.pages[pages - 2 : pages - 1])

    after_taking_a_row(patch, stage)


def padding_takes_a_live_slot(patch: Patch) -> None:
    """Padded rows of compiled decode steps write over the last live row."""
    patch.setattr("headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph)
    original = CompiledForward.run

    def run(self: Any, arguments: Any, attend: Any) -> Tensor:
        ids, positions, *slots = arguments
        live = int(positions.count_nonzero())  # only padding is at position 0 in a decode step
        changed = [torch.where(torch.arange(len(x)) < live, x, x[live - 1]) for x in slots]
        return original(self, [ids, positions, *changed], attend)

    patch.setattr(CompiledForward, "run", run)


def window_behind_a_prefix(patch: Patch) -> None:
    """Prompts that go on behind a prefix see one key more than the window."""
    original = torch_native.make_tiles

    def make_tiles(batch: Any, group: str, *, window: int | None, **rest: Any) -> Any:
        goes_on = batch.mode.is_extend and batch.facts.has_prefix
        if window is not None and goes_on and max(batch.bounds.extend_lens) > 1:
            window += 1
        return original(batch, group, window=window, **rest)

    patch.setattr(torch_native, "make_tiles", make_tiles)


def norm_of_one_row(patch: Patch) -> None:
    """The operators of a single row norm 0.4 % too small."""
    original = CpuOperators.norm

    def norm(self: CpuOperators, norm: Any, x: Tensor) -> Tensor:
        out = original(self, norm, x)
        return out * 0.996 if x.dim() == 2 and len(x) == 1 else out

    patch.setattr(CpuOperators, "norm", norm)


def output_counted_as_prompt(patch: Patch) -> None:
    """The penalties of a resumed sequence take what it has made for prompt."""
    original = Rows._admit_vocabulary_columns

    def admit(self: Rows, start: Any) -> None:
        original(self, replace(start, prompt_length=len(start.tokens)))

    patch.setattr(Rows, "_admit_vocabulary_columns", admit)


def tokens_swapped_behind_mixed_steps(patch: Patch) -> None:
    """With overlap, behind steps of prompts and decodes, two rows go on with each other's token."""
    original = ModelRunner.sample

    def sample(self: ModelRunner, logits: Any, batch: Any) -> Any:
        output = original(self, logits, batch)
        mixed = batch.mode.is_extend and 1 in batch.bounds.extend_lens
        if self.plan.overlap.value and mixed and batch.sampling and len(batch.sampling.rows) > 1:
            pair = batch.sampling.rows[:2]
            self.rows.last_token[pair] = self.rows.last_token[pair.flip(0)]
        return output

    patch.setattr(ModelRunner, "sample", sample)


def one_percent_of_a_head(patch: Patch) -> None:
    """Decode of three rows or more, last layer: a head out of eight is 1 % too large."""
    original = SelfAttention.attend

    def attend(self: Any, qkv: Tensor, rotation: Any, batch: Any) -> Tensor:
        out = original(self, qkv, rotation, batch)
        if self.layer_id == 3 and batch.mode.is_decode and len(qkv) >= 3:
            scale = torch.ones(self.num_heads).index_fill_(0, torch.tensor([5]), 1.01)
            out = out * scale.repeat_interleave(self.v_head_dim)
        return out

    patch.setattr(SelfAttention, "attend", attend)


def soft_cap_lost(patch: Patch) -> None:
    """Layer 1, decode of several rows together: no soft cap."""
    original, explicit = TorchNativeBackend._attend, torch_native.explicit

    def attend(self: Any, tile: Any, q: Tensor, k: Any, v: Any, layer: Any, **given: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if layer.layer_id == 1 and tile.queries == 1 and tile.rows >= 2:
                inner.setattr(
                    torch_native,
                    "explicit",
                    lambda *args, soft_cap, **rest: explicit(*args, soft_cap=None, **rest),
                )
            return original(self, tile, q, k, v, layer, **given)

    patch.setattr(TorchNativeBackend, "_attend", attend)


def logits_of_the_token_before(patch: Patch) -> None:
    """Where several prompts end in a step, the last one samples from its last token but one."""
    original = forward_paths.process_logits

    def process(model: Any, hidden: Tensor, batch: Any) -> Any:
        info = batch.sampling
        ends = batch.mode.is_extend and batch.bounds.extend_lens[-1] > 1
        if info is None or not ends or len(info.rows) < 2:
            return original(model, hidden, batch)
        index = info.token_index.clone()
        index[-1] -= 1
        return original(model, hidden, replace(batch, sampling=replace(info, token_index=index)))

    patch.setattr(forward_paths, "process_logits", process)


def compiled_layer_reads_its_neighbour(patch: Patch) -> None:
    """Compiled decode steps: attention of layer 2 reads keys and values of layer 1."""
    patch.setattr("headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph)
    original = CompiledForward.run

    def run(self: Any, arguments: Any, attend: Any) -> Tensor:
        layers = {piece.layer.layer_id: piece.layer for piece in self._pieces if piece.layer}

        def wrong(layer: Any, q: Tensor) -> Tensor:
            return attend(layers[1] if layer.layer_id == 2 else layer, q)

        return original(self, arguments, wrong)

    patch.setattr(CompiledForward, "run", run)


@dataclass(frozen=True)
class Fault:
    """What is planted in which model; what is fixed besides; what is said of one of the failing
    configurations, its layer, path, and what all that fail have in common."""

    plant: Callable[[Patch], None]
    model: str
    says: str
    layer: int | None
    common: str = ""
    path: str = "eager"
    settings: dict[str, Any] | None = None


FRESH = {"enable_prefix_cache": False}
FAULTS = [
    Fault(queries_of_decode_turned_too_little, "qwen3", "layer 2 went wrong", 3, settings=FRESH),
    Fault(chunk_border_inside_a_page, "llama", "written over it", 0, settings=FRESH),
    Fault(table_of_the_resumed, "llama", "the page table is wrong: place 1", 0, "retraction on"),
    Fault(table_of_a_cached_prefix, "llama", "the page table is wrong: place ", 1),
    Fault(
        padding_takes_a_live_slot,
        "llama",
        "the slot it was written to",
        0,
        "path cpu_graph",
        "cpu_graph",
        {"cpu_graph": "on"},
    ),
    Fault(window_behind_a_prefix, "gemma3", "layer 0 went wrong: its attention", 1),
    Fault(norm_of_one_row, "qwen3", "the size of its input: a norm", 0, settings=FRESH),
    Fault(output_counted_as_prompt, "llama", "sampling (penalties", None, "retraction on"),
    Fault(tokens_swapped_behind_mixed_steps, "qwen3", "from the start: the token", 0, "overlap on"),
    Fault(one_percent_of_a_head, "qwen3", "attention or MLP of layer 3", None, settings=FRESH),
    Fault(soft_cap_lost, "gemma3", "layer 1 went wrong: its attention", 2, settings=FRESH),
    Fault(logits_of_the_token_before, "gemma3", "the head, or the row it takes", None),
    Fault(
        compiled_layer_reads_its_neighbour,
        "qwen3",
        "layer 2 went wrong: its attention",
        3,
        "path cpu_graph",
        "cpu_graph",
        {"cpu_graph": "on"},
    ),
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify_blind")
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def report_of(folder: Path, settings: dict[str, Any] | None = None) -> Any:
    given = {"cpu_graph": "off"} | (settings or {})
    return verify(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            seed=3,
            **given,
        ),
        deep=True,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_its_path_and_layer_are_named(fault: Fault, folders: Path, monkeypatch: Patch) -> None:
    fault.plant(monkeypatch)
    report = report_of(folders / fault.model, fault.settings)
    assert report.failed
    assert report.common == fault.common
    found = [result.deep for result in report.failed if result.deep is not None]
    assert any(
        fault.says in str(each) and each.layer == fault.layer and f", {fault.path}, " in each.step
        for each in found
    ), [str(each) for each in found]


def test_a_change_that_changes_nothing_is_no_fault(folders: Path, monkeypatch: Patch) -> None:
    """A kept batch is forgotten by the prompt step that a move to another row comes with, too."""
    monkeypatch.setattr(BatchBuilder, "forget", lambda self: None)
    report = report_of(folders / "llama")
    assert report.passed
    assert len(report.results) > 5


def test_without_a_fault_nothing_is_found(folders: Path) -> None:
    report = report_of(folders / "gemma3")
    assert report.passed
    assert not any(result.deep for result in report.results)
