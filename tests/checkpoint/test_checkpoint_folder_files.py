"""config.json, generation_config.json and the tokenizer files of a folder."""

import json

import pytest
from checkpoint_builders import random_weights, write_folder, write_json

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint import open_checkpoint

TOKENIZER = {
    "added_tokens": [{"id": 7, "content": "<end>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "plain_end": 5}, "merges": []},
}


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", random_weights())


def source(folder):
    return open_checkpoint(folder).tokenizer_source


def test_no_tokenizer(folder):
    assert source(folder) is None


def test_tokenizer_json(folder):
    file = write_json(folder / "tokenizer.json", TOKENIZER)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>", "add_bos_token": False})
    found = source(folder)
    assert (found.tokenizer_json, found.folder, found.gguf) == (file, None, None)
    assert found.settings == {"eos_token": "<end>", "add_bos_token": False}
    assert found.chat_template is None


@pytest.mark.parametrize("is_old", [True, False])
def test_the_map_of_special_tokens_goes_first_in_old_folders(folder, is_old):
    """Where the two differ the end of a turn is in the map, and nothing stopped there."""
    config = {"eos_token": "</s>"} | ({} if is_old else {"added_tokens_decoder": {}})
    write_json(folder / "tokenizer.json", TOKENIZER)
    write_json(folder / "tokenizer_config.json", config)
    special = {"bos_token": "a", "eos_token": "<end>", "additional_special_tokens": ["<call>"]}
    write_json(folder / "special_tokens_map.json", special)
    found = source(folder)
    assert found.settings == {**config, **special, "eos_token": "<end>" if is_old else "</s>"}
    assert found.eos_token_ids == ((2, 7) if is_old else (2,))  # 2 by config.json


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_only_transformers_reads(folder, name):
    (folder / name).write_text("{}")
    found = source(folder)
    assert (found.tokenizer_json, found.folder) == (None, folder)


def test_end_tokens_are_the_union_of_all_files(folder):
    write_json(folder / "tokenizer.json", TOKENIZER)
    write_json(folder / "tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    write_json(folder / "generation_config.json", {"eos_token_id": [3, 2, 11], "top_p": 0.9})
    assert source(folder).eos_token_ids == (2, 3, 7, 11)
    assert open_checkpoint(folder).generation_config["top_p"] == 0.9


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token_id": None}, ()),
        ({"eos_token_id": 0}, (0,)),
        ({"eos_token_id": [4, 5]}, (4, 5)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [1, 106]}}, (1, 106)),
    ],
)
def test_end_tokens_of_config_json(tmp_path, config, expected):
    folder = write_folder(tmp_path / "model", random_weights(), config=config)
    write_json(folder / "tokenizer.json", TOKENIZER)
    assert source(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    ("settings", "tokenizer", "expected"),
    [
        ({"eos_token": "x", "added_tokens_decoder": {"9": {"content": "x"}}}, TOKENIZER, 9),
        ({"eos_token": "<end>"}, TOKENIZER, 7),
        ({"eos_token": "plain_end"}, TOKENIZER, 5),
        ({"eos_token": "q"}, {"model": {"vocab": [["p", -1.0], ["q", -2.0]]}}, 1),
        ({"eos_token": "absent"}, TOKENIZER, None),
        ({"eos_token": None}, TOKENIZER, None),
        ({}, TOKENIZER, None),
    ],
)
def test_end_token_of_the_tokenizer(folder, settings, tokenizer, expected):
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", settings)
    others = {2}  # config.json
    assert set(source(folder).eos_token_ids) - others == ({expected} - {None})


def test_chat_template_places(folder):
    write_json(folder / "tokenizer.json", TOKENIZER)
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write_json(folder / "tokenizer_config.json", {"chat_template": several})
    assert source(folder).chat_template == {"tool_use": "T", "default": "D"}
    write_json(folder / "tokenizer_config.json", {"chat_template": "plain"})
    assert source(folder).chat_template == "plain"
    write_json(folder / "chat_template.json", {"chat_template": "own file"})
    assert source(folder).chat_template == "own file"
    (folder / "chat_template.jinja").write_text("größer")
    assert source(folder).chat_template == "größer"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert source(folder).chat_template == {"default": "größer", "tool_use": "T"}
    (folder / "chat_template.jinja").unlink()
    assert source(folder).chat_template == {"tool_use": "T"}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_unreadable_json_is_named(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"{name} is not the JSON it should be"):
        open_checkpoint(folder)


def test_json_as_python_and_windows_write_it(folder):
    """Configs of Mamba 2 hold Infinity; editors of Windows put a mark before UTF-8."""
    file, unusual = folder / "config.json", {"limit": [0.0, float("inf")], "unused": float("nan")}
    text = json.dumps(json.loads(file.read_text()) | unusual)
    file.write_bytes(text.encode("utf-8-sig"))
    assert open_checkpoint(folder).config["limit"] == unusual["limit"]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_unreadable_tokenizer_json_is_named(folder, name):
    write_json(folder / "tokenizer.json", TOKENIZER)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>"})
    (folder / name).write_bytes(b'{"added_tokens": 3, "\xff": 1}')
    with pytest.raises(CheckpointError, match=f"{name} is not the JSON"):
        source(folder)


def test_missing_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
    ],
)
def test_packed_weights_are_refused_by_name(tmp_path, config):
    folder = write_folder(tmp_path, random_weights(), config=config)
    method = str(config).rsplit("quant_method': '", 1)[1].split("'")[0]
    with pytest.raises(
        UnsupportedError, match=rf"quantized with {method}.*Supported: .safetensors"
    ):
        open_checkpoint(folder)


NO_IDS = ["5", ["x"], [None], {}, [[1]], 1.5, True]
NO_TOKEN = [{}, 5, ["<s>"], {"content": 5}]


def wrong(name, key, values):
    return [(name, key, value) for value in values]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *wrong("config.json", "eos_token_id", NO_IDS),
        *wrong("generation_config.json", "eos_token_id", NO_IDS),
        *wrong("config.json", "num_hidden_layers", [2**31, 2**63, 2**70, 1e30, "2"]),
        *wrong("config.json", "quantization_config", ["awq", 4, [1]]),
        *wrong("config.json", "compression_config", ["awq", 4, [1]]),
        *wrong("config.json", "text_config", ["x", 4, [1], {"eos_token_id": "5"}]),
    ],
)
def test_a_value_of_another_type_is_named(folder, name, key, value):
    content = json.loads((folder / name).read_text()) if name == "config.json" else {}
    write_json(folder / name, content | {key: value})
    with pytest.raises(CheckpointError, match=rf"{name} is not the JSON it should be.*\.{key}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *wrong("tokenizer_config.json", "bos_token", NO_TOKEN),
        *wrong("tokenizer_config.json", "eos_token", NO_TOKEN),
        *wrong("special_tokens_map.json", "unk_token", NO_TOKEN),
        *wrong("tokenizer_config.json", "additional_special_tokens", ["x", 5, [5], [{}], {"a": 1}]),
        *wrong("tokenizer_config.json", "extra_special_tokens", ["x", 5, [None], {"a": {}}]),
        *wrong("tokenizer_config.json", "added_tokens_decoder", [[], {"5": "x"}, {"5": {}}]),
        *wrong("tokenizer_config.json", "added_tokens_decoder", [{"five": {"content": "x"}}]),
        *wrong("tokenizer_config.json", "chat_template", [5, {}, ["x"], [{"name": "default"}]]),
        *wrong("chat_template.json", "chat_template", [5, {}, ["x"], [{"template": "x"}]]),
    ],
)
def test_a_tokenizer_value_of_another_type_is_named(folder, name, key, value):
    write_json(folder / "tokenizer.json", TOKENIZER)
    write_json(folder / name, {key: value})
    with pytest.raises(CheckpointError, match=rf"{name} is not the JSON it should be.*\.{key}"):
        source(folder)


def test_values_that_checkpoints_do_have(folder):
    write_json(folder / "tokenizer.json", TOKENIZER)
    settings = {
        "bos_token": None,
        "eos_token": {"content": "<end>", "lstrip": False},
        "extra_special_tokens": {"image_token": "<image>"},
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "added_tokens_decoder": {"7": {"content": "<end>", "special": True}},
    }
    write_json(folder / "tokenizer_config.json", settings)
    assert source(folder).settings == settings


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_json_nested_too_deep(folder, name):
    write_json(folder / "tokenizer.json", TOKENIZER)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>"})
    (folder / name).write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(CheckpointError, match=f"{name} is not the JSON it should be"):
        source(folder)


def test_a_chat_template_that_is_not_utf8(folder):
    write_json(folder / "tokenizer.json", TOKENIZER)
    (folder / "chat_template.jinja").write_bytes(b"gr\xf6\xdfer")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
        source(folder)


@pytest.mark.parametrize("is_link", [True, False])
@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_folder_or_a_broken_link_in_place_of_a_file(folder, name, is_link):
    write_json(folder / "tokenizer.json", TOKENIZER)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>"})
    (folder / name).unlink(missing_ok=True)
    if is_link:
        (folder / name).symlink_to(folder / "nowhere")
    else:
        (folder / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        source(folder)
