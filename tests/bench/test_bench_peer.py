"""The peer runs the very weights that we run: greedy tokens agree."""

from pathlib import Path

import pytest
import torch

from headrace.base.errors import UnsupportedError
from headrace.bench.contestants import Headrace, TransformersPeer
from headrace.bench.setting import Setting, engines_of
from headrace.checkpoint.opening import open_checkpoint
from headrace.llm import LLM

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=2,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("peer") / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_both_make_the_same_tokens(folder: Path) -> None:
    prompts = [[5, 6, 7, 8], [9, 10]]  # of different lengths, so the peer pads
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        ours, peer = engines_of(llm, "transformers")
        assert isinstance(ours, Headrace)
        made = ours.run(prompts, 6)
        assert made == peer.run(prompts, 6)
        assert len({tuple(tokens) for tokens in made}) == 2
        setting = Setting.of(llm, threads=1, repeats=2)
        assert (setting.device, setting.dtype, setting.vocab_size) == ("cpu", "float32", 64)
        assert [engine.name for engine in engines_of(llm, None)] == ["headrace"]


def test_a_checkpoint_that_does_not_fit_the_peer_is_refused(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    names = list(checkpoint.tensors)

    class Short:
        config = checkpoint.config
        tensors = dict.fromkeys(names[1:])
        read = checkpoint.read

    with pytest.raises(UnsupportedError, match="do not fit together"):
        TransformersPeer(Short(), dtype=torch.float32, device=torch.device("cpu"))
