"""The family of docs/add-a-model.md reads a config; what the pages name exists."""

import re
from pathlib import Path

import pytest

from headrace.config.persona import ModelTraits
from headrace.models.decoder import CausalDecoder
from headrace.models.registry import Family

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headrace"
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def test_the_family_reads_a_config() -> None:
    page = ROOT / "docs" / "add-a-model.md"
    family, entry = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    names: dict[str, object] = {"Family": Family}
    exec(compile(family, str(page), "exec"), names)
    made = eval(compile(entry, str(page), "eval"), names)
    assert issubclass(made.module, CausalDecoder)
    traits = made.traits(CONFIG)
    assert isinstance(traits, ModelTraits)
    assert (traits.family, traits.num_layers, traits.attention.qkv_bias) == ("mine", 2, True)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|md))?)`", page.read_text())
    if page.stem.startswith(("add", "life")):  # pages for those who read the code
        assert named
    for name in named:
        assert any((base / name).exists() for base in (PACKAGE, ROOT)), name


def test_names_that_the_life_of_a_step_gives_exist() -> None:
    text = (ROOT / "docs" / "life-of-a-step.md").read_text()
    source = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`", text):
        assert re.search(rf"^class {owner}\b", source, flags=re.MULTILINE), owner
        assert re.search(rf"^    def {name}\b", source, flags=re.MULTILINE), name
