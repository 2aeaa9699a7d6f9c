"""Which reader a path gets, and what is refused."""

import shutil

import pytest
from checkpoint_builders import random_weights, write_folder, write_gguf, write_json

from headrace.base.errors import CheckpointError, ConfigError, NotFoundError, UnsupportedError
from headrace.checkpoint import open_checkpoint, open_tokenizer
from headrace.config.engine_config import EngineConfig


def test_a_gguf_file_and_a_folder_that_holds_one(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", random_weights())
    assert open_checkpoint(file).path == file
    assert open_checkpoint(tmp_path).path == file


def test_a_gguf_file_of_any_name(tmp_path):
    file = write_gguf(tmp_path / "model", random_weights())
    assert open_checkpoint(file).config["model_type"] == "llama"


def test_several_gguf_files(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", random_weights())
    shutil.copy(file, tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 .gguf files.*a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


def test_what_macos_puts_beside_a_gguf_file_is_none(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", random_weights())
    (tmp_path / "._a.gguf").write_bytes(b"\0\5\x16\7")
    assert open_checkpoint(tmp_path).path == file


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match=r"holds an adapter.*Merge it into its base model"):
        open_checkpoint(tmp_path)
    write_folder(tmp_path, random_weights())  # a whole model may have one beside it
    assert open_checkpoint(tmp_path).path == tmp_path


def test_safetensors_go_before_gguf(tmp_path):
    write_gguf(tmp_path / "a.gguf", random_weights())
    assert open_checkpoint(write_folder(tmp_path, random_weights())).path == tmp_path


def test_nothing_there(tmp_path):
    with pytest.raises(NotFoundError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint.*config.json with \*.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        open_checkpoint(tmp_path)


def test_a_tokenizer_alone(tmp_path):
    """sglang#25565: `save_pretrained` of a tokenizer writes no config.json."""
    model = write_folder(tmp_path / "model", random_weights())
    alone = tmp_path / "tokenizer"
    alone.mkdir()
    config = EngineConfig(model=str(model), tokenizer=str(alone))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        open_tokenizer(config)
    write_json(alone / "tokenizer.json", {"added_tokens": [{"id": 3, "content": "</s>"}]})
    write_json(alone / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": "T"})
    source = open_tokenizer(config)
    assert (source.tokenizer_json, source.eos_token_ids) == (alone / "tokenizer.json", (3,))
    assert source.chat_template == "T"
    assert open_tokenizer(EngineConfig(model=str(model))) is None
    shutil.copy(alone / "tokenizer.json", model)
    assert open_tokenizer(EngineConfig(model=str(model))).tokenizer_json.parent == model


def test_a_chat_template_of_the_operator(tmp_path):
    model = write_folder(tmp_path / "model", random_weights())
    file = tmp_path / "tools.jinja"
    config = EngineConfig(model=str(model), chat_template=file)
    with pytest.raises(ConfigError, match=r"chat_template is .*tools\.jinja'\. There is no such"):
        open_tokenizer(config)
    file.write_text(" \n")
    with pytest.raises(ConfigError, match=r"chat_template is .*tools\.jinja\. The file is empty"):
        open_tokenizer(config)
    file.write_text("{{ mine }}")
    with pytest.raises(ConfigError, match="The checkpoint has no tokenizer"):
        open_tokenizer(config)
    write_json(model / "tokenizer.json", {"added_tokens": []})
    write_json(model / "tokenizer_config.json", {"chat_template": "theirs"})
    source = open_tokenizer(config)
    assert (source.chat_template, source.chat_template_file) == ("{{ mine }}", file)
    theirs = open_tokenizer(EngineConfig(model=str(model)))
    assert (theirs.chat_template, theirs.chat_template_file) == ("theirs", None)
    file.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        open_tokenizer(config)


@pytest.mark.parametrize("name", ["model.safetensors", "x.gguf", "tokenizer.json"])
def test_a_pointer_of_git_in_place_of_a_file(tmp_path, name):
    """transformers#27923, ollama#5245: HeaderTooLarge, or a magic number of 'vers'."""
    if name != "x.gguf":
        write_folder(tmp_path, random_weights())
        write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>"})
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
        _ = open_checkpoint(tmp_path).tokenizer_source


def test_pickled_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(UnsupportedError, match=r"pytorch_model.bin holds pickled.*Supported"):
            open_checkpoint(path)


def test_one_file_of_a_folder(tmp_path):
    write_folder(tmp_path, random_weights())
    with pytest.raises(CheckpointError, match="Name its folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_some_other_file(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes.txt is not a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")


def test_remote_code_is_left_to_the_model_room(tmp_path):
    config = {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}, "model_type": "x"}
    folder = write_folder(tmp_path, random_weights(), config=config)
    (folder / "modeling_x.py").write_text("raise RuntimeError('ran')")
    assert open_checkpoint(folder).config["auto_map"] == config["auto_map"]
