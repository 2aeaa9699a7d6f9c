"""Real weights through the whole engine against transformers (see make_reference.py).

Logits of every checked position, and greedy continuations of several prompts in one batch.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from real_reference import (
    CONTINUED,
    LENGTHS,
    NEW_TOKENS,
    PAST_THE_WINDOW,
    STRIDE,
    TOLERANCE,
    RealReference,
    load_reference,
    model_file,
)
from torch import Tensor

from headrace import LLM
from headrace.engine.outputs import CompletionOutput, RequestOutput
from headrace.request.sampling_params import SamplingParams

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def name(request: pytest.FixtureRequest) -> str:
    model_file(request.param)  # skips without the package
    return request.param


@pytest.fixture(scope="module")
def reference(name: str) -> RealReference:
    return load_reference(name)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine two threads of so small a model wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(name: str) -> Iterator[LLM]:
    with LLM(name, device="cpu", dtype="float32", max_model_len=1024) as llm:
        yield llm


class LogitRecorder:
    """Keeps what the model's head gives while the engine works, [n, V] a call."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Tensor] = []
        model = llm.engine.worker.runner.model
        compute = model.compute_logits

        def record(hidden: Tensor) -> Tensor:
            logits: Tensor = compute(hidden)
            self.calls.append(logits.clone())
            return logits

        monkeypatch.setattr(model, "compute_logits", record)

    def of_prompt(self, llm: LLM, prompt: list[int]) -> tuple[Tensor, RequestOutput]:
        """Logits [L, V] of every position of a prompt that is served alone, and its output."""
        self.calls.clear()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        # One step: the row that samples comes first, then those of the prompt.
        sampled, *scored = self.calls
        logits = torch.cat([*scored, sampled])
        assert len(logits) == len(prompt)
        return logits, output


@pytest.mark.parametrize("prompt", range(len(LENGTHS)), ids=[f"length {n}" for n in LENGTHS])
def test_logits(
    llm: LLM, reference: RealReference, monkeypatch: pytest.MonkeyPatch, prompt: int
) -> None:
    ids, rows = reference.prompts[prompt], reference.rows_of(prompt)
    logits, output = LogitRecorder(llm, monkeypatch).of_prompt(llm, ids)
    compare(logits[reference.places[rows, 1]], reference, prompt)
    assert output.prompt_logprobs is not None
    for row in rows[:-1]:
        position = reference.places[row, 1] + 1
        entry = output.prompt_logprobs[position][ids[position]]
        assert abs(entry.logprob - reference.target_logprobs[row]) <= TOLERANCE


def test_logits_past_the_window(
    llm: LLM, reference: RealReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks: the last one sees keys of earlier ones, and in Gemma's window layers only some."""
    prompt = len(LENGTHS)
    assert len(reference.prompts[prompt]) == PAST_THE_WINDOW
    recorder = LogitRecorder(llm, monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate(reference.prompts[prompt], params, use_tqdm=False)
    compare(recorder.calls[-1], reference, prompt)


def compare(logits: Tensor, reference: RealReference, prompt: int) -> None:
    """Logits [n, V] with the rows of a prompt."""
    rows = reference.rows_of(prompt)
    top = torch.from_numpy(reference.top_ids[rows]).long()
    found = {
        "likeliest": (logits.gather(1, top), reference.top_logits[rows]),
        "others": (logits[:, ::STRIDE], reference.other_logits[rows]),
        "sum": (logits.double().logsumexp(-1), reference.logsumexp[rows]),
    }
    for kind, (ours, theirs) in found.items():
        difference = np.abs(ours.numpy() - theirs).max()
        assert difference <= TOLERANCE, f"{kind} differ by {difference}"
    # Tokens outside the stored ones stay below them.
    rest = logits.scatter(1, top, -torch.inf).amax(-1).numpy()
    assert (rest <= reference.top_logits[rows].min(-1) + TOLERANCE).all()


def test_continuations_in_one_batch(llm: LLM, reference: RealReference) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    outputs = llm.generate([reference.prompts[p] for p in CONTINUED], params, use_tqdm=False)
    agreed = sum(
        agreeing_tokens(reference, row, output.outputs[0]) for row, output in enumerate(outputs)
    )
    assert agreed >= 0.9 * reference.greedy.size, "the continuations parted too early to tell"


def agreeing_tokens(reference: RealReference, row: int, output: CompletionOutput) -> int:
    """Tokens up to the first that differs, which it may where the reference hardly decides."""
    assert output.logprobs is not None
    for place, token in enumerate(output.token_ids):
        expected = reference.greedy[row, place]
        if token != expected:
            gap = reference.gaps[row, place]
            assert gap <= 2 * TOLERANCE, f"token {place} is {token}, not {expected}, gap {gap}"
            return place
        logprob = output.logprobs[place][token].logprob
        assert abs(logprob - reference.greedy_logprobs[row, place]) <= TOLERANCE
    assert len(output.token_ids) == NEW_TOKENS
    return NEW_TOKENS
