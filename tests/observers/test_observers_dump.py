"""Dumps hold what was asked, on every path, through every face."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dumps import EVERYTHING, GREEDY, compare, dump, prompts
from operator_recorder import as_if_on_a_gpu
from safetensors.torch import save_file
from tiny_engine import make_engine, run_all

from headrace import LLM
from headrace.base.errors import RequestError
from headrace.cli.main import main
from headrace.engine.engine import Engine
from headrace.observers.dump_files import in_order, open_dump
from headrace.request.sampling_params import SamplingParams


def test_a_file_a_step_with_what_was_asked(engine: Engine, tmp_path: Path) -> None:
    steps = dump(engine, tmp_path / "a", names=EVERYTHING)
    assert len(steps) == 5
    first = steps[0].facts
    assert (first.path, first.backend, first.mode, first.dtype) == (
        "eager",
        "torch_native",
        "EXTEND",
        "float32",
    )
    assert first.sequences == ("request-0", "request-1", "request-2")
    assert first.rows == (1, 2, 3)
    assert steps[1].facts.mode == "DECODE"
    assert in_order(sorted(steps[0].names)) == [
        *("k.0", "v.0", "stream.0", "k.1", "v.1", "stream.1", "logits"),
    ]
    ids, positions, sequence = steps[0].read("input_ids", "positions", "sequence")
    assert ids.tolist() == [token for prompt in prompts() for token in prompt]
    assert positions.tolist() == [*range(20), *range(9), *range(33)]
    assert sequence.tolist() == [0] * 20 + [1] * 9 + [2] * 33
    stream, key, logits = steps[0].read("stream.1", "k.0", "logits")
    assert stream.shape == (62, 64)
    assert key.shape == (62, 2, 16)
    assert logits.shape == (3, 272)
    assert steps[0].read("logit_token")[0].tolist() == [19, 28, 61]
    (tmp_path / "other").touch()
    assert steps[0].path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_the_stream_and_kv_are_the_models_own(engine: Engine, tmp_path: Path) -> None:
    (step,) = dump(engine, tmp_path / "a", [prompts()[0]], names=EVERYTHING, steps=1)
    model = engine.worker.runner.model
    stream, logits = step.read("stream.1", "logits")
    with torch.inference_mode():
        expected = model.compute_logits(model.model.norm(stream[-1:]))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_layers_names_and_steps_are_chosen(engine: Engine, tmp_path: Path) -> None:
    steps = dump(engine, tmp_path / "a", layers=[1], names=["v"], steps=2)
    assert len(steps) == 2
    assert in_order(sorted(steps[0].names)) == ["v.1"]


def test_dumps_of_other_batches_and_chunks_agree(llama_folder: Path, tmp_path: Path) -> None:
    whole = make_engine(llama_folder, enable_prefix_cache=False)
    dump(whole, tmp_path / "a")
    cut = make_engine(llama_folder, chunked_prefill_size=7, page_size=4, retract_every=6)
    dump(cut, tmp_path / "b")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.agrees
    assert found.tokens == 62 + 3 * 4
    assert found.paired_by == "name"
    assert {each.name: each.tokens for each in found.tensors}["k.0"] == found.tokens
    assert "the dumps agree within the rounding of float32" in str(found)


def test_kv_and_logits_are_there_on_every_path(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = make_engine(llama_folder, enable_prefix_cache=False)
    dump(eager, tmp_path / "a", names=EVERYTHING)
    as_if_on_a_gpu(monkeypatch)
    graph = make_engine(llama_folder, prefill_graph="breakable", enable_prefix_cache=False)
    steps = dump(graph, tmp_path / "b")
    assert {step.facts.path for step in steps} == {"prefill_graph", "eager"}
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.agrees
    assert found.missing == ("stream.0", "stream.1")
    assert found.paths == ("eager", "eager, prefill_graph")


def test_a_stream_is_refused_where_paths_keep_it_unless_steps_run_eagerly(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_on_a_gpu(monkeypatch)
    engine = make_engine(llama_folder, prefill_graph="breakable", enable_prefix_cache=False)
    with pytest.raises(RequestError, match="prefill_graph run what was recorded") as caught:
        engine.dumper.start(str(tmp_path / "a"), names=EVERYTHING)
    assert "eager" in caught.value.remedy
    steps = dump(engine, tmp_path / "b", names=EVERYTHING, eager=True)
    assert {step.facts.path for step in steps} == {"eager"}
    refused = {entry["refused"] for entry in engine.stats()["paths"]}
    assert any("a dump was asked to see every step run eagerly" in each for each in refused)
    run_all(engine, prompts(), [GREEDY] * 3)  # and graphs are back
    assert any(entry["path"] == "prefill_graph" for entry in engine.stats()["paths"])
    parts = make_engine(llama_folder, split_prefill_layers=1)
    with pytest.raises(RequestError, match=r"split_prefill run .* the model in parts"):
        parts.dumper.start(str(tmp_path / "c"), names=EVERYTHING)


def test_a_sequence_that_ended_says_nothing(llama_folder: Path, tmp_path: Path) -> None:
    """With overlap a row takes one step more than it has tokens for."""
    engine = make_engine(llama_folder, enable_overlap=True)
    stop = run_all(engine, prompts()[:1], [GREEDY])[0].outputs[0].token_ids[1]
    stopping = SamplingParams(temperature=0.0, max_tokens=5, stop_token_ids=[stop])
    engine.dumper.start(str(tmp_path / "a"))
    run_all(engine, prompts()[:2], [stopping, GREEDY])
    engine.settle()
    engine.dumper.stop()
    live = [step.read("live")[0].tolist() for step in open_dump(tmp_path / "a")]
    assert [False, True] in live


# ---- faces


def test_the_command_line_dumps_and_compares(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--seed", "3"]
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        flags[-1] = seed
        dumps = ["--dump-folder", str(tmp_path / name), "--dump-layers", "0,1"]
        ids = ["--prompt-ids", "1,2,3,4", "--max-tokens", "3", "--json", "--temperature", "0"]
        assert main(["generate", str(llama_folder), *flags, *ids, *dumps]) == 0
        assert f"\ndump: {tmp_path / name}\n" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "the dumps agree" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "c"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first"] == "k.0"  # other weights
    assert main(["diff", str(tmp_path / "a"), str(tmp_path)]) == 2
    assert "holds no dump" in capsys.readouterr().err


def test_the_llm_dumps_within_a_context(llama_folder: Path, tmp_path: Path) -> None:
    with LLM(
        str(llama_folder), load_format="dummy", device="cpu", dtype="float32", max_model_len=64
    ) as llm:
        with llm.dump(tmp_path / "a", steps=2):
            llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
            with pytest.raises(RequestError, match="A dump runs already"):
                llm.engine.dumper.start("b")
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert len(open_dump(tmp_path / "a")) == 2
        assert "dump" not in llm.stats()["observers"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"names": ["q"]}, "Give a list of some of k, v, stream, logits"),
        ({"names": []}, "Give a list of some of"),
        ({"names": "kv"}, "names is 'kv'"),
        ({"names": 3}, "names is 3"),
        ({"names": [["k"]]}, r"names has \['k'\]"),
        ({"layers": [2]}, "layers 0 to 1"),
        ({"layers": [-1]}, "layers 0 to 1"),
        ({"layers": []}, "layers 0 to 1"),
        ({"layers": ["0"]}, "layers 0 to 1"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": torch.tensor(0)}, "layers is tensor"),
        ({"names": torch.tensor(0)}, "names is tensor"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": "1"}, "steps is '1'"),
        ({"steps": True}, "steps is True"),
        ({"eager": "yes"}, "eager is 'yes'. Allowed: True or False"),
    ],
)
def test_what_cannot_be_dumped_is_refused(
    engine: Engine, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        engine.dumper.start(str(tmp_path / "a"), **options)
    assert not (tmp_path / "a").exists()
    with pytest.raises(RequestError, match="No dump runs"):
        engine.dumper.stop()


def test_what_was_raised_within_is_what_is_heard(
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("headrace.observers.dump_files.save_file", full)
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "max_model_len": 64}
    with LLM(str(llama_folder), **options) as llm:

        def interrupted() -> None:
            llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), llm.dump(tmp_path / "a"):
            interrupted()
        assert "ended after 0 steps. No space left" in caplog.text
        with pytest.raises(RequestError, match="No space left"), llm.dump(tmp_path / "a"):
            llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="This LLM is closed"), llm.dump(tmp_path / "b"):
        pass


def test_the_command_line_says_where_the_profile_is(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load-format", "dummy", "--device", "cpu", "--max-model-len", "16"]
    asked = ["--prompt-ids", "1,2", "--max-tokens", "1", "--json", "--profile", str(tmp_path)]
    assert main(["generate", str(llama_folder), *flags, *asked]) == 0
    (file,) = tmp_path.glob("*.trace.json.gz")
    assert f"\nprofile: {file}\n" in capsys.readouterr().err


def test_an_error_of_the_command_line_is_not_hidden_by_a_profile_of_nothing(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load-format", "dummy", "--device", "cpu", "--max-model-len", "16"]
    watched = ["--profile", str(tmp_path), "--dump-folder", str(tmp_path / "dump")]
    ids = ["--prompt-ids", ",".join(["1"] * 20)]
    assert main(["generate", str(llama_folder), *flags, *ids, *watched]) == 2
    assert "headrace: error: The prompt has 20 tokens" in capsys.readouterr().err
    (tmp_path / "dump" / "step-000001.safetensors").touch()
    assert main(["generate", str(llama_folder), *flags, "--prompt-ids", "1", *watched]) == 2
    assert "dump holds a dump already" in capsys.readouterr().err


def test_flags_of_a_dump_without_its_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is even looked for."""
    command = ["generate", "no-such-model", "--prompt-ids", "1"]
    lone: list[tuple[str, ...]] = [
        ("--dump-layers", "0"),
        ("--dump-names", "k", "v"),
        ("--dump-steps", "2"),
        ("--dump-eager",),
    ]
    for flags in lone:
        assert main([*command, *flags]) == 2
        assert f"{flags[0]} came without --dump-folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for flag in ("--dump-folder", "--profile"):
        assert main([*command, flag, str(tmp_path / "file")]) == 2
        assert "cannot be written to" in capsys.readouterr().err


def test_folders_that_cannot_be_are_refused(engine: Engine, tmp_path: Path) -> None:
    dump(engine, tmp_path / "a", steps=1)
    with pytest.raises(RequestError, match="holds a dump already"):
        engine.dumper.start(str(tmp_path / "a"))
    with pytest.raises(RequestError, match="cannot be written"):
        engine.dumper.start("/proc/nowhere")


def test_a_dump_that_cannot_be_written_ends_and_no_request_does(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even half a step is left: the steps before it are a dump that can be compared."""

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata)
        if json.loads(metadata["step"]) == 3:
            path.write_bytes(path.read_bytes()[:1000])
            raise OSError("No space left on device")

    monkeypatch.setattr("headrace.observers.dump_files.save_file", full)
    engine.dumper.start(str(tmp_path / "a"))
    (output,) = run_all(engine, prompts()[:1], [GREEDY])
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match=r"after 2 steps.*No space left"):
        engine.dumper.stop()
    assert len(list((tmp_path / "a").iterdir())) == len(open_dump(tmp_path / "a")) == 2
