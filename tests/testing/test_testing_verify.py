"""verify finds what is wrong, and names the configurations that it is wrong in."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.attention import torch_native
from headrace.config.engine_config import EngineConfig
from headrace.execution import preparation
from headrace.execution.preparation import BatchPreparation
from headrace.memory.radix_cache import RadixCache
from headrace.scheduler.page_keeper import PageKeeper
from headrace.testing.combinations import Configuration
from headrace.testing.verify import verify
from headrace.testing.verify_report import VerifyReport
from headrace.testing.workload import OwnPrompt

# A window is 16 tokens; pages are crossed in prompts and in outputs.
PROMPTS = [
    [(7 * place + 31 * index) % 250 for place in range(length)]
    for index, length in enumerate((62, 61, 33, 15, 3))
]
PROMPTS[1][:40] = PROMPTS[0][:40]
NEW_TOKENS = 5


def run(model: str, **options: Any) -> VerifyReport:
    settings = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "cpu_graph": "off",  # compiling takes longer than all the rest
        "seed": 3,
    }
    prompts = [OwnPrompt(prompt=prompt, max_tokens=NEW_TOKENS) for prompt in PROMPTS]
    return verify(EngineConfig(model=model, **(settings | options)), prompts=prompts)


# Faults that have nothing to do with chunks or caches are looked for without varying them.
FEW = {"chunked_prefill_size": 64, "enable_prefix_cache": False}


def failed_where(report: VerifyReport, wrong: Callable[[Configuration], bool]) -> None:
    """Exactly the configurations that are `wrong` fail, and the report names each of them."""
    assert {str(each.configuration) for each in report.failed} == {
        str(each.configuration) for each in report.results if wrong(each.configuration)
    }
    assert report.failed
    assert not report.passed
    shown = str(report)
    for each in report.failed:
        assert f"FAILED {each.configuration}\n  paths: eager (" in shown


def test_everything_agrees(model: str) -> None:
    report = run(model)
    assert report.passed, str(report)
    assert 10 <= len(report.results) <= 16
    assert all(result.max_difference < 1e-4 for result in report.results)
    assert all(len(result.sequences) == 2 * len(PROMPTS) for result in report.results)
    assert all(set(result.paths) == {"eager"} for result in report.results)
    refused = {refusal.subject: refusal.reason for refusal in report.refused}
    assert refused["decode_graph / torch_native"] == "CUDA graphs need a CUDA device"


def test_a_mixture_of_experts_agrees(model: str, tmp_path: Path) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = run(str(tmp_path), max_running_requests=8, page_size=16, chunked_prefill_size=29)
    assert report.passed, str(report)
    assert len(report.results) >= 4


def test_what_was_asked_for_does_not_vary(model: str) -> None:
    report = run(
        model, page_size=4, chunked_prefill_size=7, enable_prefix_cache=False, enable_overlap=True
    )
    assert report.passed, str(report)
    found = [result.configuration for result in report.results]
    assert {(each.page_size, each.chunk, each.cache, each.overlap) for each in found} == {
        (4, 7, "off", True)
    }
    assert {each.retraction for each in found} == {False, True}


def test_bfloat16_is_near_and_a_fault_is_far(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = {"page_size": 16, "enable_overlap": False, **FEW}
    report = run(model, dtype="bfloat16", **narrow)
    assert report.passed, str(report)
    assert max(result.max_difference for result in report.results) > 1e-3
    plant_shifted_rope(monkeypatch, page_size=16)
    report = run(model, dtype="bfloat16", **narrow)
    failed_where(report, lambda each: True)


def plant_shifted_rope(monkeypatch: pytest.MonkeyPatch, *, page_size: int) -> None:
    original = BatchPreparation.fill

    def fill(self: BatchPreparation, batch: Any) -> None:
        original(self, batch)
        if self._page_size == page_size and batch.mode.is_decode:
            batch.positions = batch.positions + 1

    monkeypatch.setattr(BatchPreparation, "fill", fill)


def test_a_stale_column_of_the_page_table(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PageKeeper.grow

    @contextmanager
    def without_staging(keeper: PageKeeper) -> Iterator[None]:
        keeper.rows.stage = lambda *given: None  # type: ignore[method-assign]
        yield
        del keeper.rows.stage

    def grow(self: PageKeeper, sequence: Any, length: int) -> bool:
        if self.page_size != 16:
            return original(self, sequence, length)
        with without_staging(self):
            return original(self, sequence, length)

    monkeypatch.setattr(PageKeeper, "grow", grow)
    failed_where(run(model, **FEW), lambda each: each.page_size == 16)


def test_a_wrong_slot(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = preparation.write_slots

    def write_slots(rows: Any, positions: Any, active: Any, table: Any, page_size: int) -> Any:
        slots = original(rows, positions, active, table, page_size)
        return slots.roll(1) if page_size == 1 else slots

    monkeypatch.setattr(preparation, "write_slots", write_slots)
    failed_where(run(model, **FEW), lambda each: each.page_size == 1)


def test_a_window_off_by_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_native.make_tiles

    def make_tiles(batch: Any, group: str, *, window: int | None, **rest: Any) -> Any:
        if window is not None and batch.kv[group].page_size == 64:
            window += 1
        return original(batch, group, window=window, **rest)

    monkeypatch.setattr(torch_native, "make_tiles", make_tiles)
    failed_where(run(model, **FEW), lambda each: each.page_size == 64)


def test_pages_of_a_cached_prefix_in_the_wrong_order(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RadixCache.match

    def match(self: RadixCache, *given: Any) -> Any:
        found = original(self, *given)
        return replace(found, pages=found.pages[::-1])

    monkeypatch.setattr(RadixCache, "match", match)
    # A prefix of one page looks the same both ways, so only small pages show it everywhere.
    failed_where(
        run(model, page_size=1, chunked_prefill_size=64), lambda each: each.cache in ("warm", "hit")
    )


def test_a_cache_that_is_never_hit(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RadixCache.match
    monkeypatch.setattr(RadixCache, "match", lambda self, key, tokens: original(self, key, []))
    report = run(model, page_size=16, chunked_prefill_size=64)
    failed_where(report, lambda each: each.cache in ("warm", "hit"))
    assert "0 cached tokens, at least 48 were in the cache" in str(report)


def test_a_step_that_fails_is_told(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = BatchPreparation.fill

    def fill(self: BatchPreparation, batch: Any) -> None:
        if self._page_size == 1 and batch.mode.is_decode:
            raise RuntimeError("out of luck")
        original(self, batch)

    monkeypatch.setattr(BatchPreparation, "fill", fill)
    report = run(model, **FEW)
    failed_where(report, lambda each: each.page_size == 1)
    assert "ended with error RuntimeError: out of luck" in str(report)


def test_logits_that_are_not_numbers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_native.TorchNativeBackend.forward

    def forward(self: Any, q: Any, layer: Any, batch: Any, **given: Any) -> torch.Tensor:
        out = original(self, q, layer, batch, **given)
        return out * float("nan") if self.page_size == 64 else out

    monkeypatch.setattr(torch_native.TorchNativeBackend, "forward", forward)
    failed_where(run(model, **FEW), lambda each: each.page_size == 64)
