"""The difference of two dumps names the first layer; what is no dump is refused."""

import json
from pathlib import Path

import pytest
import torch
from dumps import EVERYTHING, compare, dump, prompts
from safetensors.torch import load_file, save_file
from tiny_engine import make_engine

from headrace.base.errors import ConfigError
from headrace.cli.main import main
from headrace.engine.engine import Engine
from headrace.observers.dump_diff import diff_dumps
from headrace.observers.dump_files import open_dump


def test_the_first_layer_that_differs_is_named(
    engine: Engine, llama_folder: Path, tmp_path: Path
) -> None:
    dump(engine, tmp_path / "a", names=EVERYTHING)
    other = make_engine(llama_folder, enable_prefix_cache=False)
    other.worker.runner.model.model.layers[0].mlp.act = torch.tanh
    dump(other, tmp_path / "b", names=EVERYTHING)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.first is not None
    assert found.first.name == "stream.0"
    by_name = {each.name: each for each in found.tensors}
    assert not by_name["k.0"].differs
    assert by_name["k.1"].differs
    assert by_name["k.1"].cosine < 0.9999
    assert by_name["logits"].max_abs > 0.01
    told = str(found)
    assert "stream.0 differs first" in told
    assert told.count("DIFFERS") == 5  # and all behind it


def test_tokens_that_part_are_told_and_nothing_behind_is_compared(
    engine: Engine, tmp_path: Path
) -> None:
    one, other = prompts()[0], [*prompts()[0]]
    other[12] += 1
    dump(engine, tmp_path / "a", [one])
    again = make_engine(Path(engine.settled.config.model), enable_prefix_cache=False)
    dump(again, tmp_path / "b", [other])
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.agrees
    assert found.tokens == 12
    assert found.alone == (12, 12)
    (parting,) = found.partings
    assert (parting.sequence, parting.position) == ("request-0", 12)
    assert "nothing from there on is compared" in str(found)


def test_tokens_that_one_dump_lacks_are_told(engine: Engine, tmp_path: Path) -> None:
    last = dump(engine, tmp_path / "a", prompts()[:1], names=["k"])[-1]
    whole = open_dump(tmp_path / "a")
    found = diff_dumps(whole, whole[:-1])
    assert found.alone == (len(last.read("live")[0]), 0)
    assert f"not in both: {found.alone[0]} tokens of the first dump, 0 of" in str(found)
    assert "not in both" not in str(diff_dumps(whole, whole))


def test_sequences_of_other_names_are_paired_in_order(engine: Engine, tmp_path: Path) -> None:
    dump(engine, tmp_path / "a")
    dump(engine, tmp_path / "b")  # request-3 and so on
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.paired_by == "order"
    assert found.agrees


def test_half_precision_has_its_own_bounds(llama_folder: Path, tmp_path: Path) -> None:
    dump(make_engine(llama_folder), tmp_path / "a", [prompts()[0]], steps=1)
    dump(make_engine(llama_folder, dtype="bfloat16"), tmp_path / "b", [prompts()[0]], steps=1)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.dtype == "bfloat16"
    assert found.agrees
    assert found.tensors[0].worst > 1e-4


@pytest.mark.parametrize("names", [("k", "v"), ("logits",)])
def test_what_is_no_number_in_one_dump_differs(
    engine: Engine, tmp_path: Path, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = prompts()[1:2]
    dump(engine, tmp_path / "a", wanted, names=names, steps=1)
    layer = engine.worker.runner.model.model.layers[0]
    torch.nn.init.constant_(layer.input_layernorm.weight, torch.nan)
    dump(engine, tmp_path / "b", wanted, names=names, steps=1)
    for pair, status in (("ab", 1), ("ba", 1), ("bb", 0)):
        assert main(["diff", *(str(tmp_path / each) for each in pair), "--json"]) == status
        found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        first = "logits" if names == ("logits",) else "k.0"
        assert found["first"] == (first if status else None)


def test_files_that_are_no_steps_are_refused(engine: Engine, tmp_path: Path) -> None:
    (step,) = dump(engine, tmp_path / "a", prompts()[:1], layers=[0], steps=1)
    tensors, texts = load_file(step.path), step.facts.texts()
    short = {name: tensor[:1].clone() for name, tensor in tensors.items()}
    for says, more_texts, more in (
        ("Its sequences is 5", {"sequences": "5"}, {}),
        ("Its bucket is", {"bucket": "[1]"}, {}),
        ("Its dtype is 'int3'", {"dtype": '"int3"'}, {}),
        ("Expecting value", {"path": "eager"}, {}),
        ("Maximum recursion", {"rows": "[" * 10_000}, {}),
        ("Its sequence leads beyond the 0", {"sequences": "[]"}, {}),
        ("Its positions is I64 of shape .1.", {}, {"positions": short["positions"]}),
        ("Its live is I64", {}, {"live": tensors["positions"].clone()}),
        ("Its k.0 is F32 of shape .1, ", {}, {"k.0": short["k.0"]}),
        ("Its k.0 is F8", {}, {"k.0": tensors["k.0"].to(torch.float8_e4m3fn)}),
        ("Its logits is F32 of shape .272.", {}, {"logits": tensors["logits"][0].clone()}),
        ("Its logit_token leads beyond the 20", {}, {"logit_token": torch.tensor([20])}),
        ("contain tensor sequence", {}, {"sequence": None}),
        ("contain tensor logit_token", {}, {"logit_token": None}),
    ):
        changed = {name: each for name, each in (tensors | more).items() if each is not None}
        save_file(changed, step.path, texts | more_texts)
        with pytest.raises(ConfigError, match=f"step-000001.* cannot be read.*{says}"):
            open_dump(tmp_path / "a")


def test_dumps_without_anything_in_common_are_refused(engine: Engine, tmp_path: Path) -> None:
    dump(engine, tmp_path / "a", [[1, 2, 3]], names=["k"])
    dump(engine, tmp_path / "b", [[4, 5, 6]], names=["k"])
    with pytest.raises(ConfigError, match="nothing in common"):
        compare(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match="holds no dump"):
        open_dump("~nobody-of-this-name/dump")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "step-000001.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_dump(tmp_path / "c")
