"""Hidden states of sequences that stop, are aborted, fail or wait for a mask."""

from pathlib import Path
from typing import Any

import pytest
import torch
from state_cases import NUM_LAYERS, VOCAB, Reference, asking, engine_of, prompts
from tiny_engine import make_engine, run_all


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("states", ["last", "all"])
def test_stops_drop_the_rows_of_dropped_tokens(
    llama_folder: Path, states: str, overlap: bool
) -> None:
    """A stop string is seen one step late; that step's token is dropped, and its row with it."""
    engine = make_engine(llama_folder, cpu_graph="off", enable_overlap=overlap)
    free = asking(states, (0, -1), max_tokens=24, temperature=0.9)
    (whole,) = run_all(engine, [[65, 66, 67, 68]], [free])
    text = whole.outputs[0].text
    stop = next(text[place : place + 2] for place in range(3, len(text)) if text[place].isascii())
    (cut,) = run_all(
        engine,
        [[65, 66, 67, 68]],
        [asking(states, (0, -1), max_tokens=24, temperature=0.9, stop=[stop])],
    )
    part = cut.outputs[0]
    assert part.finish_reason == "stop"
    assert 0 < len(part.token_ids) < 24
    expected = len(part.token_ids) + (3 if states == "all" else 0)
    assert len(part.hidden_states) == expected
    assert torch.allclose(
        part.hidden_states.states, whole.hidden_states.states[:expected], atol=1e-5
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
def test_an_abort_leaves_what_was_there(llama: Reference, turns: int, overlap: bool) -> None:
    engine = engine_of(llama, chunked_prefill_size=24, enable_overlap=overlap)
    params = [asking("all", (0, -1), n=2), asking("last")]
    handles = [engine.add(prompts()[5], each) for each in params]
    for _ in range(turns):
        engine.step()
    engine.abort([handle.request_id for handle in handles])
    for handle, each in zip(handles, params, strict=True):
        for part in handle.output().outputs:
            found, prompt = part.hidden_states, prompts()[5]
            assert part.finish_reason == "abort"
            first, layers = found.first_position, each.state_layers(NUM_LAYERS)
            assert found.states.shape[1:] == (len(layers), 32)
            tokens = [*prompt, *part.token_ids][: first + len(found)]
            if part.token_ids:
                assert len(found) == len(prompt) + len(part.token_ids) - 1 - first
            assert torch.allclose(
                found.states, llama.states(tokens or [0], layers)[first : len(tokens)], atol=1e-4
            )
    engine.scheduler.check_integrity()


def test_a_step_that_fails_leaves_what_was_there(llama: Reference) -> None:
    engine = engine_of(llama, chunked_prefill_size=20)
    forward, calls = engine.worker.forward_batch_generation, []

    def faulty(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 3:
            raise ZeroDivisionError("a step that raises")
        return forward(batch)

    engine.worker.forward_batch_generation = faulty  # type: ignore[method-assign]
    (output,) = run_all(engine, [prompts()[5]], [asking("all")])
    assert output.outputs[0].finish_reason == "error"
    assert len(output.hidden_states) == 40
    expected = llama.states(prompts()[5][:40], (NUM_LAYERS,))
    assert torch.allclose(output.hidden_states.states, expected, atol=1e-4)


def test_logits_that_are_no_numbers_leave_no_row(llama: Reference) -> None:
    engine = engine_of(llama, chunked_prefill_size=20)
    engine.worker.runner.model.compute_logits = lambda hidden: torch.full(
        (len(hidden), VOCAB), torch.nan
    )
    for states, rows in (("last", 0), ("all", 40)):  # those of the chunks before
        (output,) = run_all(engine, [prompts()[5]], [asking(states, (0, -1))])
        assert output.outputs[0].finish_reason == "error"
        assert output.hidden_states.states.shape == (rows, 2, 32)


def test_rows_with_masks_skip_steps(llama_folder: Path) -> None:
    pytest.importorskip("xgrammar")
    from headrace.request.structured_output import StructuredOutput

    engine = make_engine(llama_folder, cpu_graph="off", enable_overlap=True)
    form = StructuredOutput(regex="[a-f]{12}")
    masked = asking("last", max_tokens=20, structured=form, ignore_eos=False)
    params = [masked, asking("all", max_tokens=20)]
    outputs = run_all(engine, [[65, 66], [67, 68, 69]], params)
    text, states = outputs[0].outputs[0].text, outputs[0].hidden_states
    assert len(text) == 12
    assert len(states) == len(outputs[0].outputs[0].token_ids)
    tokens = [65, 66, *outputs[0].outputs[0].token_ids]
    whole = asking("all", max_tokens=1, temperature=0)
    (again,) = run_all(make_engine(llama_folder, cpu_graph="off"), [tokens[:-1]], [whole])
    assert torch.allclose(again.hidden_states.states[1:], states.states, atol=1e-5)
