"""Backends over FlashInfer and sgl_kernel: what they give their libraries, proven by stand-ins."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import attention_library_fakes as fakes
import pytest
import torch

from headrace.attention.backend import AttentionBackend
from headrace.attention.capabilities import AttentionNeed, Phase
from headrace.attention.fa3_backend import FlashAttention3Backend
from headrace.attention.flashinfer_backend import FlashInferBackend
from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.attention.selection import PREFERENCES, select_attention
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import Bucket
from headrace.config.hardware import Hardware, assumed_hardware
from headrace.config.persona import KvKind
from headrace.testing.attention import check_attention_backend
from headrace.testing.attention_checks import metadata_in_graph
from headrace.testing.paged_batches import Case, Pool, check, make_scene, run

KINDS = (FlashInferBackend, FlashAttention3Backend)
INSTALL = {"flashinfer": "pip install flashinfer-python", "fa3": "pip install sglang-kernel"}
MODULE = {"flashinfer": "flashinfer", "fa3": "sgl_kernel"}
NEED = AttentionNeed(
    phase=Phase.DECODE,
    kv_kind=KvKind.FULL,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=64,
)
each = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def hardware(name: str = "h200") -> Hardware:
    return replace(assumed_hardware(name), packages=frozenset({"triton", *MODULE.values()}))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins in place of the packages."""
    for name, module in fakes.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    return


def on_the_cpu(kind: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend as it is, but for the platforms that it claims and the package that it needs."""

    class OnTheCpu(kind):  # type: ignore[misc, valid-type]
        name = kind.name
        capabilities = replace(kind.capabilities, platforms=None)

        @classmethod
        def unavailable(cls, hardware: Any) -> None:
            return None

    return OnTheCpu


@each
def test_without_its_package_it_is_refused_with_the_way_to_get_it(
    kind: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = assumed_hardware("h200")
    (refusal,) = kind.refusals(NEED, bare)
    assert MODULE[kind.name] in refusal.reason
    assert refusal.remedy == INSTALL[kind.name]
    with pytest.raises(UnsupportedError, match=INSTALL[kind.name]):
        select_attention(Phase.DECODE, kind.name, NEED, bare)
    monkeypatch.setitem(sys.modules, MODULE[kind.name], None)
    case = Case(rows=[(0, 1)], dims=(64, 64), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="cannot load") as caught:
        make_scene(case).backend(kind)
    assert INSTALL[kind.name] in str(caught.value)


@each
def test_a_package_that_lacks_another_is_refused_and_not_an_import_error(
    kind: type[AttentionBackend], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / MODULE[kind.name]
    package.mkdir()
    (package / "__init__.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE[kind.name], raising=False)
    with pytest.raises(UnsupportedError, match="there_is_no_such_module"):
        make_scene(Case(rows=[(0, 1)], dims=(64, 64), dtype=torch.bfloat16)).backend(kind)


@each
def test_what_it_claims(kind: type[AttentionBackend]) -> None:
    claims = kind.capabilities
    assert claims.kv_kinds == {KvKind.FULL, KvKind.WINDOW}
    assert claims.platforms == {"cuda"}
    assert claims.dtypes == claims.kv_dtypes == {"bfloat16", "float16"}
    assert (claims.sliding_window, claims.soft_cap, claims.sinks) == (True, True, False)
    assert (claims.graph_decode, claims.graph_prefill) == (True, False)
    assert {claims.needs_exact_host_lengths, claims.deterministic, claims.speculation} == {False}
    wide = replace(NEED, window=4096, soft_cap=True, graph=True)
    assert kind.refusals(wide, hardware()) == []


@pytest.mark.parametrize(
    ("kind", "change", "machine", "reason"),
    [
        (FlashInferBackend, {}, "mi300x", "does not run on rocm"),
        (FlashInferBackend, {"head_dim": 96, "v_head_dim": 96}, "h200", "dimension of 96"),
        (FlashInferBackend, {"v_head_dim": 64}, "h200", "of one dimension"),
        (FlashInferBackend, {"sinks": True}, "h200", "no attention sinks"),
        (FlashAttention3Backend, {}, "a100-80", "is for compute capability (9, 0), not (8, 0)"),
        (FlashAttention3Backend, {}, "b200", "is for compute capability (9, 0), not (10, 0)"),
        (FlashAttention3Backend, {"page_size": 128}, "h200", "page size 128"),
        (FlashAttention3Backend, {"v_head_dim": 64}, "h200", "of one dimension"),
        (FlashAttention3Backend, {"dtype": "float32", "kv_dtype": "float32"}, "h200", "float32"),
    ],
)
def test_what_it_refuses(
    kind: type[AttentionBackend], change: dict[str, Any], machine: str, reason: str
) -> None:
    found = kind.refusals(replace(NEED, **change), hardware(machine))
    assert any(reason in refusal.reason for refusal in found)
    assert all(refusal.remedy for refusal in found)


def test_flashinfer_needs_ampere() -> None:
    turing = replace(hardware(), capability=(7, 5))
    assert any("(7, 5)" in each.reason for each in FlashInferBackend.refusals(NEED, turing))
    assert FlashInferBackend.refusals(NEED, hardware("a100-80")) == []


def test_auto_takes_neither() -> None:
    assert select_attention(Phase.DECODE, "auto", NEED, hardware()).value == "triton"
    preferred = {name for each in PREFERENCES.values() for name in each.backends}
    assert not preferred & {kind.name for kind in KINDS}
    assert set(ATTENTION_BACKENDS) >= {kind.name for kind in KINDS}


@each
@pytest.mark.usefixtures("libraries")
def test_the_stand_ins_and_the_adapter_keep_every_claim(kind: type[AttentionBackend]) -> None:
    report = check_attention_backend(on_the_cpu(kind), "cpu", thorough=False)
    report.check()
    passed = {each.subject for each in report.findings if each.verdict == "ok"}
    assert passed >= {
        "ended rows",
        "padding rows",
        "padding tokens",
        "metadata in graph",
        "a layer's own window",
        "all habits, lse",
        "one step after another",
    }


@each
@pytest.mark.slow
@pytest.mark.usefixtures("libraries")
def test_they_keep_every_claim_in_all_cases(kind: type[AttentionBackend]) -> None:
    check_attention_backend(on_the_cpu(kind), "cpu").check()


@each
@pytest.mark.usefixtures("libraries")
def test_rows_without_new_tokens(kind: type[AttentionBackend]) -> None:
    rows = [(20, 0), (0, 5), (3, 0), (17, 30)]
    check(Case(rows=rows, dims=(64, 64), dtype=torch.bfloat16), on_the_cpu(kind), with_lse=True)


@each
@pytest.mark.usefixtures("libraries")
def test_full_pages_and_padding_in_a_graph(kind: type[AttentionBackend]) -> None:
    rows = [(15, 1), (0, 1), (-1, 1), (63, 1)]
    metadata_in_graph(kind, Case(rows=rows, dims=(64, 64), dtype=torch.bfloat16, decode=True))


@each
@pytest.mark.usefixtures("libraries")
def test_a_pool_may_be_a_view_by_heads_and_what_does_not_fit_is_refused(
    kind: type[AttentionBackend],
) -> None:
    scene = make_scene(Case(rows=[(40, 1), (0, 3)], dims=(64, 64), dtype=torch.bfloat16))
    keys, values = scene.layer.pool.key_value(0)
    by_heads = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (keys, values)]
    assert not by_heads[0].is_contiguous()
    backend = scene.backend(kind)
    want, _ = run(scene, backend)
    scene.layer.pool = Pool(page_size=16, keys=by_heads[0], values=by_heads[1])
    assert torch.equal(run(scene, backend)[0], want)
    strided = keys.transpose(0, 3).contiguous().transpose(0, 3)
    scene.layer.pool = Pool(page_size=16, keys=strided, values=strided)
    with pytest.raises(UnsupportedError, match="cannot read this KV pool"):
        run(scene, backend)


@pytest.mark.usefixtures("libraries")
def test_flashinfer_takes_keys_and_values_of_one_layout() -> None:
    scene = make_scene(Case(rows=[(40, 1)], dims=(64, 64), dtype=torch.bfloat16))
    keys, values = scene.layer.pool.key_value(0)
    other = values.transpose(1, 2).contiguous().transpose(1, 2)
    scene.layer.pool = Pool(page_size=16, keys=keys, values=other)
    with pytest.raises(UnsupportedError, match="Strides of keys"):
        run(scene, scene.backend(FlashInferBackend))


@pytest.mark.usefixtures("libraries")
def test_flashinfer_plans_once_a_step_and_once_a_graph() -> None:
    scene = make_scene(
        Case(rows=[(40, 1), (9, 1)], dims=(64, 64), dtype=torch.bfloat16, decode=True)
    )
    backend = scene.backend(FlashInferBackend, longest=500)
    assert isinstance(backend, FlashInferBackend)
    for step in (1, 2):
        backend.prepare_metadata(scene.batch)
        for _ in range(3):  # layers
            backend.forward(scene.q, scene.layer, scene.batch)
        (wrapper,) = backend._eager.values()
        assert wrapper.planned == step
    for variant in ("", "filters"):
        backend.capture_buffers(Bucket(tokens=2, sequences=2, variant=variant))
    for _ in range(2):
        backend.prepare_metadata_in_graph(scene.batch)
        backend.forward(scene.q, scene.layer, scene.batch)
    (wrapper,) = backend._graphs[2].wrappers.values()
    assert (wrapper.planned, wrapper.graph) == (1, True)


@pytest.mark.usefixtures("libraries")
def test_fa3_reads_no_page_behind_the_window() -> None:
    case = Case(
        rows=[(199, 1), (10, 1)],
        dims=(64, 64),
        window=20,
        dtype=torch.bfloat16,
        decode=True,
    )
    scene = make_scene(case)
    backend = scene.backend(FlashAttention3Backend)
    assert isinstance(backend, FlashAttention3Backend)
    backend.prepare_metadata(scene.batch)
    keys = backend._keys[20]
    assert keys.lengths.tolist() == [200 - 11 * 16, 11]
    assert keys.table[0, :2].tolist() == scene.batch.kv["full"].page_table[0, 11:13].tolist()
    assert keys.table.shape[1] == 3
