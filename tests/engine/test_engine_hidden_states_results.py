"""Hidden states as callers get them, and what cannot be had."""

import pytest
import torch
from state_cases import EVERY, NUM_LAYERS, Reference, asking, engine_of, prompts
from tiny_engine import run_all


def test_the_last_piece_has_them(llama: Reference) -> None:
    engine, params = engine_of(llama), asking("all", (0, -1), n=2)
    handle = engine.add(prompts()[2], params)
    pieces = []
    while not handle.is_finished:
        engine.step()
        pieces += handle.take_pieces()
    found = [piece.hidden_states for piece in pieces if piece.hidden_states is not None]
    assert [piece.finish_reason for piece in pieces if piece.hidden_states] == ["length"] * 2
    for ours, part in zip(found, handle.output().outputs, strict=True):
        assert torch.equal(ours.states, part.hidden_states.states)


def test_the_result_says_what_it_is(llama: Reference) -> None:
    (output,) = run_all(engine_of(llama), [[1, 2, 3]], [asking("last", (-1, 0))])
    states = output.hidden_states
    assert states is output.outputs[0].hidden_states
    assert repr(states) == (
        "TokenStates(rows=9, layers=(3, 0), hidden_size=32, dtype=float32, first_position=2)"
    )
    assert states.states.data_ptr() == states.states.data_ptr()


def test_bfloat16_stays_bfloat16(llama: Reference) -> None:
    engine = engine_of(llama, dtype="bfloat16")
    params = asking("all", (0, -1))
    (output,) = run_all(engine, [prompts()[2]], [params])
    states = output.hidden_states.states
    assert states.dtype == torch.bfloat16
    tokens = [*prompts()[2], *output.outputs[0].token_ids][:-1]
    assert (states.float() - llama.states(tokens, (0, NUM_LAYERS))).abs().mean() < 0.02


@pytest.mark.parametrize("layers", [(4,), (0, -5)])
def test_layers_that_are_not_there_are_refused(llama: Reference, layers: tuple[int, ...]) -> None:
    engine = engine_of(llama)
    with pytest.raises(ValueError, match=r"hidden_state_layers is .*\[-4, 3\]: this model has 3"):
        engine.add([1], asking("last", layers))
    assert not engine.has_work


def test_more_states_than_a_step_may_leave_are_refused(
    llama: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llama, chunked_prefill_size=40)
    memory = engine.settled.hardware.memory_bytes
    monkeypatch.setattr("headrace.engine.options.STATES_SHARE", (40 * 2 * 32 * 4 + 0.5) / memory)
    prompt = list(range(60))
    for params in (asking("all", (0, -1)), asking("all", (1,)), asking("last", EVERY)):
        llama.check(run_all(engine, [prompt], [params])[0], params)
    with pytest.raises(ValueError, match=r"40 positions and 3 layers take 15,360 bytes.*10,240 b"):
        engine.add(prompt, asking("all", (0, 1)))
    llama.check(run_all(engine, [prompt[:9]], [asking("all", EVERY)])[0], asking("all", EVERY))
