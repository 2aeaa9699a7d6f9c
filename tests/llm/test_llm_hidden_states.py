"""Hidden states through the face: whole, streamed, several continuations, and none."""

import pytest
import torch
from tiny_llm import ids, joined

from headrace import LLM, SamplingParams

PROMPT = ids(3, 21)
ALL = SamplingParams(
    max_tokens=7, ignore_eos=True, seed=5, return_hidden_states="all", hidden_state_layers=[0, 1, 2]
)


def test_outputs_have_what_was_asked(llm: LLM) -> None:
    last = SamplingParams(max_tokens=7, ignore_eos=True, return_hidden_states=True, n=2)
    plain = SamplingParams(max_tokens=7, ignore_eos=True)
    outputs = llm.generate([PROMPT] * 3, [ALL, last, plain], use_tqdm=False)
    assert outputs[0].hidden_states.states.shape == (21 + 6, 3, 64)
    for part in outputs[1].outputs:
        assert part.hidden_states.states.shape == (7, 1, 64)
        assert part.hidden_states.first_position == 20
    assert outputs[1].hidden_states is outputs[1].outputs[0].hidden_states
    assert outputs[2].hidden_states is outputs[2].outputs[0].hidden_states is None
    of_prompt = outputs[0].hidden_states.states[20, 2]
    assert torch.allclose(outputs[1].hidden_states.states[0, 0], of_prompt, atol=1e-5)


def test_the_last_piece_of_a_stream_has_them(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, ALL, use_tqdm=False)
    pieces = list(llm.stream(PROMPT, ALL))
    assert joined(pieces)[1] == output.outputs[0].token_ids
    assert all(piece.hidden_states is None for piece in pieces[:-1])
    assert torch.allclose(pieces[-1].hidden_states.states, output.hidden_states.states, atol=1e-5)


def test_the_head_makes_the_tokens_of_these_states(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=7, ignore_eos=True, temperature=0, return_hidden_states="last"
    )
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    model = llm.engine.worker.runner.model
    with torch.inference_mode():
        logits = model.compute_logits(output.hidden_states.states[:, 0].clone())
    assert logits.argmax(1).tolist() == output.outputs[0].token_ids


def test_a_layer_that_is_not_there_is_refused_before_anything_runs(llm: LLM) -> None:
    wrong = SamplingParams(return_hidden_states=True, hidden_state_layers=[3])
    before = llm.stats()["steps"]
    with pytest.raises(ValueError, match=r"Prompt 1: hidden_state_layers is .*this model has 2"):
        llm.generate([PROMPT] * 2, [ALL, wrong], use_tqdm=False)
    assert llm.stats()["steps"] == before
