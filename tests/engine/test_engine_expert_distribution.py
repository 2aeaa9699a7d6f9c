"""Recordings of the spread of tokens over experts: every live token once, padding and warm-up not
at all."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import MOE, make_engine, run_all, write_checkpoint

from headrace.base.errors import ConfigError, RequestError
from headrace.engine.engine import Engine
from headrace.engine.expert_recorder import ExpertRecorder
from headrace.request.sampling_params import SamplingParams

LAYERS, EXPERTS, CHOSEN = 2, 8, 2  # layers that have experts
NEW = 6
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
PROMPTS = [[5, 9, 77], [*range(40, 61)], [1]]
PASSED = sum(map(len, PROMPTS)) + len(PROMPTS) * (NEW - 1)  # the last token is never passed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("moe"), "moe")


def engine_of(folder: Path, mode: str = "stat", **options: Any) -> Engine:
    settings = {"expert_distribution_recorder_mode": mode, "enable_prefix_cache": False}
    return make_engine(folder, **(settings | options))


def recorded(engine: Engine, into: Path, mode: str | None = None) -> dict[str, Any]:
    """What a recording of the prompts holds."""
    recorder = ExpertRecorder(engine)
    recorder.start(mode)
    run_all(engine, PROMPTS, [PARAMS] * len(PROMPTS))
    recorder.stop()
    content: dict[str, Any] = torch.load(recorder.dump(str(into))["path"], weights_only=True)
    return content


@pytest.mark.parametrize("overlap", [False, True])
def test_the_three_modes_count_the_same(folder: Path, tmp_path: Path, overlap: bool) -> None:
    engine = engine_of(folder, chunked_prefill_size=8, enable_overlap=overlap)
    run_all(engine, PROMPTS[:1], [PARAMS])  # before the start: not counted
    stat = recorded(engine, tmp_path)
    assert stat["logical_count"].shape == (LAYERS, EXPERTS)
    assert stat["logical_count"].sum(1).tolist() == [PASSED * CHOSEN] * LAYERS
    assert stat["layers"] == [0, 2]
    assert 0 < stat["balancedness"] < 1
    passes = recorded(engine, tmp_path, "per_pass")["records"]
    total = sum(record["logical_count"] for record in passes)
    assert torch.equal(total, stat["logical_count"])
    numbers = [record["forward_pass_id"] for record in passes]
    assert numbers == list(range(numbers[0], numbers[0] + len(passes)))
    assert {record["mode"] for record in passes} >= {"extend", "decode"}
    tokens = recorded(engine, tmp_path, "per_token")["records"]
    for record in tokens:
        ids = record["topk_ids_of_layer"]
        assert ids.shape == (LAYERS, len(record["input_ids"]), CHOSEN)
        for layer, counts in zip(ids, record["logical_count"], strict=True):
            assert torch.equal(layer.flatten().long().bincount(minlength=EXPERTS), counts)
    positions = torch.cat([record["positions"] for record in tokens])
    assert len(positions) == PASSED
    passed = sorted(position for prompt in PROMPTS for position in range(len(prompt) + NEW - 1))
    assert sorted(positions.tolist()) == passed
    ids_of_prompts = torch.cat([record["input_ids"] for record in tokens]).tolist()
    assert all(ids_of_prompts.count(token) >= 1 for token in PROMPTS[1])


def test_a_row_that_ended_on_the_device_is_not_counted(folder: Path, tmp_path: Path) -> None:
    """With overlap a step is launched for it once more."""
    engine = engine_of(folder, enable_overlap=True)
    (output,) = run_all(engine, [[3, 4]], [PARAMS])
    stop = output.outputs[0].token_ids[2]
    first = output.outputs[0].token_ids.index(stop)
    recorder = ExpertRecorder(engine)
    recorder.start("per_token")
    run_all(engine, [[3, 4]], [SamplingParams(temperature=0.0, stop_token_ids=[stop])])
    records = torch.load(recorder.dump(str(tmp_path))["path"], weights_only=True)["records"]
    assert sum(len(record["positions"]) for record in records) == 2 + first
    if len(records) > 1 + first:  # the step that ran for nobody
        assert len(records[-1]["positions"]) == 0


def test_a_dump_begins_anew_and_a_start_forgets(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder, "per_pass")
    recorder = ExpertRecorder(engine)
    recorder.start()
    run_all(engine, PROMPTS, [PARAMS] * 3)
    first = torch.load(recorder.dump(str(tmp_path))["path"], weights_only=True)
    assert (first["mode"], first["rank"]) == ("per_pass", 0)
    run_all(engine, PROMPTS[:1], [PARAMS])
    second = torch.load(recorder.dump(str(tmp_path))["path"], weights_only=True)
    assert len(second["records"]) == NEW
    assert second["records"][0]["forward_pass_id"] > first["records"][-1]["forward_pass_id"]
    run_all(engine, PROMPTS[:1], [PARAMS])
    recorder.start("stat")
    recorder.stop()
    empty = torch.load(recorder.dump(str(tmp_path))["path"], weights_only=True)
    assert empty["logical_count"].sum() == 0
    assert empty["balancedness"] == 1.0
    assert len(list(tmp_path.iterdir())) == 3


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    recorder = ExpertRecorder(engine_of(folder))
    with pytest.raises(RequestError, match="Start it first"):
        recorder.stop()
    with pytest.raises(RequestError, match="Start it first"):
        recorder.dump(str(tmp_path))
    with pytest.raises(RequestError, match=r"mode is 'all'(.|\n)*stat, per_pass, per_token"):
        recorder.start("all")
    with pytest.raises(RequestError, match="mode is array"):
        recorder.start(np.array(["stat", "x"]))  # type: ignore[arg-type]
    recorder.start()
    for bad in ("/proc/nowhere", "a\0b", "~nobody-has-this-name/a"):
        with pytest.raises(RequestError, match="cannot be written"):
            recorder.dump(bad)
    off = ExpertRecorder(engine_of(folder, "off"))
    for call in (off.start, off.stop):
        with pytest.raises(RequestError, match="expert_distribution_recorder_mode stat"):
            call()


def test_a_full_disk_costs_nothing_that_was_recorded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder, "per_pass")
    recorder = ExpertRecorder(engine)
    recorder.start()
    run_all(engine, PROMPTS[:1], [PARAMS])

    def full(content: object, file: Any) -> None:
        file.write(b"half")
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - as torch does

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(RequestError, match=r"cannot be written to .*No space left"):
            recorder.dump(tmp_path)
    assert not list(tmp_path.iterdir())
    written = torch.load(recorder.dump(tmp_path)["path"], weights_only=True)
    assert len(written["records"]) == NEW


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dense = write_checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(RequestError, match="llama, has no experts"):
        ExpertRecorder(make_engine(dense)).start()
    for option in (
        {"expert_distribution_recorder_mode": "stat"},
        {"enable_return_routed_experts": True},
    ):
        with pytest.raises(ConfigError, match="has no experts"):
            make_engine(dense, **option)


def test_other_steps_between_the_parts_of_a_prompt_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="split_prefill_layers"):
        engine_of(folder, split_prefill_layers=1)


def test_without_the_recorder_the_layers_write_nothing_down(folder: Path) -> None:
    plain = engine_of(folder, "off").worker.runner
    assert plain.expert_watch is None
    assert [layer.tap for layer in plain.model.moe_layers()] == [None] * LAYERS
    assert plain.observers.members == ()
    watched = engine_of(folder).worker.runner
    assert all(layer.tap is not None for layer in watched.model.moe_layers())
    assert len(MOE["mlp_only_layers"]) + LAYERS == MOE["num_hidden_layers"]
