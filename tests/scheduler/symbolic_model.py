"""A model whose KV is the token itself and whose next token is a hash of all it can read.

It runs on the real runner, rows, page tables and scheduler. A page that is shared, freed or
written wrongly changes the history that some sequence reads, and so its output.
"""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.batch.forward_batch import ForwardBatch
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import assumed_hardware
from headrace.config.persona import AttentionTraits, LayerTraits, ModelTraits, Persona, RopeTraits
from headrace.memory.arena import Arena
from headrace.memory.budget import plan_kv_tokens
from headrace.request.outcome import Finished, Logprob
from headrace.request.packed_states import PackedStates
from headrace.runner.checkpoint_facts import CheckpointFacts
from headrace.runner.model_runner import ModelRunner
from headrace.runner.resolve import resolve
from headrace.runner.worker import TpModelWorker
from headrace.scheduler.scheduler import Scheduler

VOCAB = 97
CONTEXT = 128
UNWRITTEN = -7


def next_token(history: Sequence[int]) -> int:
    return crc32(repr(list(history)).encode()) % VOCAB


def expected_output(prompt: Sequence[int], max_tokens: int, stops: frozenset[int]) -> list[int]:
    """What the model must answer, computed without any engine."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def expected_state(prompt: Sequence[int], pooling: str) -> float:
    """The one number of its embedding, without any engine."""
    states = [next_token(prompt[: place + 1]) for place in range(len(prompt))]
    return states[-1] if pooling == "last" else sum(states) / len(states)


class SymbolicModel:
    """Writes token ids to slots and reads them back through the page tables."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.slots = torch.full((num_slots,), UNWRITTEN)
        self.page_size = page_size
        self.fails_next = False

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("injected fault")
        group = batch.kv["full"]
        self.slots[group.out_cache_loc] = input_ids
        hidden = torch.zeros(len(input_ids), 1)
        ends = torch.tensor(batch.bounds.extend_lens).cumsum(0).tolist()
        for place, length in enumerate(batch.seq_lens.tolist()):
            if length == 0:
                continue  # a stop token has ended this row on the device
            where = torch.arange(length)
            pages = group.page_table[place, where // self.page_size].long()
            history = self.slots[pages * self.page_size + where % self.page_size].tolist()
            assert UNWRITTEN not in history, "a sequence reads a slot that nobody wrote"
            hidden[ends[place] - 1] = next_token(history)
            if batch.side.hidden is not None:
                for back in range(1, batch.bounds.extend_lens[place]):
                    hidden[ends[place] - 1 - back] = next_token(history[:-back])
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB).float() * 50

    def attention_layers(self) -> list[object]:
        return []


class Recorder:
    """A `TokenSink` that checks the one ending."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.vector: NDArray[np.float32] | None = None
        self.states: PackedStates | None = None
        self.endings: list[Finished] = []

    def token(self, token_id: int, logprobs: dict[int, Logprob] | None) -> str | None:
        assert not self.endings, "a token after the ending"
        self.tokens.append(token_id)
        return None

    def prompt_logprobs(self, entries: Sequence[dict[int, Logprob] | None]) -> None:
        self.prompt_entries = list(entries)

    def embedding(self, vector: NDArray[np.float32]) -> None:
        assert not self.endings, "an embedding after the ending"
        assert self.vector is None, "two embeddings"
        self.vector = vector

    def hidden_states(self, states: PackedStates) -> None:
        assert not self.endings, "hidden states after the ending"
        assert self.states is None, "hidden states twice"
        self.states = states

    def finished(self, ending: Finished) -> None:
        self.endings.append(ending)


def symbolic_scheduler(
    *,
    pages: int,
    page_size: int = 4,
    chunk: int = 16,
    max_running: int = 4,
    overlap: bool = False,
    prefix_cache: bool = True,
    retract_every: int = 0,
    kv_canary: str = "off",
    sweep_interval: int = 0,
) -> Scheduler:
    """A scheduler over the symbolic model with a pool of so many usable pages."""
    config = EngineConfig(
        model="symbolic",
        device="cpu",
        max_model_len=CONTEXT,
        max_running_requests=max_running,
        page_size=page_size,
        chunked_prefill_size=chunk,
        enable_prefix_cache=prefix_cache,
        enable_overlap=overlap,
        kv_canary=kv_canary,
        kv_canary_sweep_interval=sweep_interval,
    )
    persona = Persona(traits=_traits())
    plan = resolve(config, persona, assumed_hardware("cpu"), checkpoint=CheckpointFacts())
    runner = ModelRunner(config, persona, plan, load_weights=lambda model: None)
    runner.arena = Arena("cpu")
    runner.init_sampler()
    runner.init_memory_pool(plan_kv_tokens(2**30, {}, 8, page_size, cap_tokens=pages * page_size))
    runner.backends = {}
    runner.model = SymbolicModel((pages + 1) * page_size, page_size)  # type: ignore[assignment]
    runner.init_forward_paths()
    return Scheduler(TpModelWorker(runner), lambda token: None, retract_every=retract_every)


def _traits() -> ModelTraits:
    attention = AttentionTraits(num_heads=1, num_kv_heads=1, head_dim=1, v_head_dim=1, scale=1.0)
    return ModelTraits(
        family="llama",
        hidden_size=1,
        intermediate_size=1,
        vocab_size=VOCAB,
        attention=attention,
        layers=(LayerTraits(kv_group="full"),),
        ropes={
            "default": RopeTraits(kind="default", theta=1e4, rotary_dim=1, max_position=CONTEXT)
        },
        norm_eps=1e-6,
        activation="silu",
        tie_word_embeddings=True,
        max_position=CONTEXT,
    )
