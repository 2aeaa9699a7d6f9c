"""`LLM`s over tiny checkpoints, outputs written by the test, and a reference for logprobs."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tiny_engine import LLAMA, VOCAB, write_checkpoint

from headrace import LLM, SamplingParams
from headrace.engine.outputs import Piece

PRINTABLE = tuple(range(94))  # ids of the characters ! to ~
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def make_llm(folder: Path, **options: Any) -> LLM:
    settings = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "max_running_requests": 16,
        "seed": 3,
    }
    return LLM(str(folder), **(settings | options))


def ids(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    """Token ids of the first continuation of each prompt."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def one(llm: LLM, prompt: Any, params: SamplingParams | None = None) -> Any:
    """The first continuation of one prompt."""
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def joined(pieces: Sequence[Piece]) -> tuple[str, list[int], list[Any]]:
    """Text, token ids and logprobs of the pieces of one continuation."""
    token_ids = [token for piece in pieces for token in piece.token_ids]
    logprobs = [entries for piece in pieces for entries in piece.logprobs or []]
    return "".join(piece.text for piece in pieces), token_ids, logprobs


def assert_nothing_is_held(llm: LLM) -> None:
    """No request runs or waits, no page is lost, and all are free once the cache is cleared."""
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    stats = llm.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert not scheduler.has_work
    assert not llm.engine._handles
    scheduler.keeper.cache.clear()
    assert scheduler.keeper.allocator.available == scheduler.keeper.allocator.total


@contextmanager
def scripted(llm: LLM, script: Sequence[int], prompt_length: int) -> Iterator[None]:
    """Let every sequence with a prompt of this length make the tokens of `script`."""
    sampler = llm.engine.worker.runner.sampler
    sample = sampler.sample

    def say(logits: Any, info: Any, rows: Any, positions: torch.Tensor) -> Any:
        output = sample(logits, info, rows, positions)
        places = (positions - prompt_length).tolist()
        said = torch.tensor([script[place] for place in places])
        return replace(output, next_token_ids=said)

    with mock.patch.object(sampler, "sample", say):
        yield


@dataclass(frozen=True)
class Reference:
    """A checkpoint with weights on disk, and transformers running it."""

    folder: Path
    model: Any

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] float32"""
        return self.model(torch.tensor([list(token_ids)])).logits[0].float()

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V]: entry p scores the token after position p."""
        return self.logits(token_ids).log_softmax(-1)


def make_reference(folder: Path) -> Reference:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    known = {name: LLAMA[name] for name in LLAMA if name not in ("architectures", "model_type")}
    model = LlamaForCausalLM(LlamaConfig(**known, bos_token_id=256)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                # So that logits have a standard deviation of about 1.
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer = write_checkpoint(folder / "tokenizer", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).rename(folder / name)
    assert model.config.vocab_size == VOCAB
    return Reference(folder, model)
