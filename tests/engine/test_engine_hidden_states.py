"""Hidden states of requests equal transformers', however their tokens were computed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_recorder import as_if_on_a_gpu
from state_cases import MODELS, NUM_LAYERS, VOCAB, Reference, write_model
from tiny_engine import make_engine, run_all, run_alone

from headrace.batch.facts import BatchFacts, Bucket, HiddenMode
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.side_request import HiddenStateRequest, SideRequest
from headrace.engine.engine import Engine
from headrace.engine.requests import RequestHandle
from headrace.models import decoder
from headrace.request.sampling_params import SamplingParams

EVERY = tuple(range(NUM_LAYERS + 1))


def asking(states: str, layers: tuple[int, ...] = (-1,), **options: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "seed": 3}
    return SamplingParams(
        return_hidden_states=states, hidden_state_layers=layers, **(settings | options)
    )


PLAIN = SamplingParams(max_tokens=9, ignore_eos=True, seed=3)
MIXED = [
    asking("last"),
    asking("all", temperature=0),
    PLAIN,
    asking("last", (0, 2), n=3),
    asking("final", (2, -1)),
    asking("all", EVERY),
    asking("all", (-1, 1), n=2),
    asking("last", max_tokens=1),
    asking("all", (1,), max_tokens=1),
]
LENGTHS = (1, 16, 33, 5, 13, 50, 17, 40, 21)


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    lists = [[draw.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    lists[5][:30] = lists[7][:30] = lists[2][:30]
    return lists


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}
    folder = tmp_path_factory.mktemp("states")

    def reference(family: str) -> Reference:
        if family not in made:
            made[family] = Reference(write_model(family, folder / family))
        return made[family]

    return reference


@pytest.fixture(scope="module", params=list(MODELS))
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


@pytest.fixture(scope="module")
def llama(references: Callable[[str], Reference]) -> Reference:
    return references("llama")


def engine_of(reference: Reference, **options: Any) -> Engine:
    settings: dict[str, Any] = {"load_format": "auto", "cpu_graph": "off"}
    return make_engine(reference.folder, **(settings | options))


def check_all(reference: Reference, engine: Engine) -> None:
    """All at once, then again one by one over a cache that has their prompts."""
    for run in (run_all, run_alone):
        for output, params in zip(run(engine, prompts(), MIXED), MIXED, strict=True):
            reference.check(output, params)


def refusals(engine: Engine) -> str:
    return "; ".join(entry["refused"] for entry in engine.stats()["paths"])


def test_states_equal_transformers(reference: Reference) -> None:
    engine = engine_of(reference)
    check_all(reference, engine)
    assert engine.stats()["prompt_tokens_cached"] > 80  # of those that ask for output tokens only


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 7},
        {"chunked_prefill_size": 3, "page_size": 1, "enable_overlap": True},
        {"page_size": 4, "retract_every": 3, "enable_overlap": True},
        {"page_size": 1, "retract_every": 2, "chunked_prefill_size": 11},
        {"page_size": 4, "max_total_tokens": 104},
        {"enable_prefix_cache": False, "enable_overlap": True, "max_running_requests": 3},
    ],
    ids=["chunks", "small-chunks", "retraction", "chunks-retracted", "few-pages", "no-cache"],
)
def test_however_tokens_are_computed(reference: Reference, options: dict[str, Any]) -> None:
    engine = engine_of(reference, **({"max_model_len": 96} | options))
    check_all(reference, engine)
    if "retract_every" in options or "max_total_tokens" in options:
        assert engine.stats()["retractions"] > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_cached_match_ends_before_the_first_state_that_is_asked(
    llama: Reference, page_size: int
) -> None:
    engine = engine_of(llama, page_size=page_size)
    prompt = prompts()[5]
    run_all(engine, [prompt], [PLAIN])
    everything, last = run_alone(engine, [prompt] * 2, [asking("all"), asking("last")])
    assert everything.cached_tokens == 0
    assert last.cached_tokens >= len(prompt) - page_size
    llama.check(everything, asking("all"))
    llama.check(last, asking("last"))


def test_continuations_of_a_request_compute_its_prompt_once(llama: Reference) -> None:
    engine = engine_of(llama, page_size=1)
    params = asking("all", EVERY, n=4)
    (output,) = run_all(engine, [prompts()[5]], [params])
    llama.check(output, params)
    assert engine.stats()["prompt_tokens"] == len(prompts()[5]) + 3  # the last token of each


def test_asking_changes_no_token(llama: Reference) -> None:
    silent = [
        SamplingParams(
            max_tokens=each.max_tokens,
            ignore_eos=True,
            seed=3,
            n=each.n,
            temperature=each.temperature,
        )
        for each in MIXED
    ]
    told = run_all(engine_of(llama), prompts(), MIXED)
    quiet = run_all(engine_of(llama), prompts(), silent)
    for ours, theirs in zip(told, quiet, strict=True):
        assert [x.token_ids for x in ours.outputs] == [x.token_ids for x in theirs.outputs]
        assert theirs.hidden_states is None


# ---- paths


def test_a_prefill_graph(llama: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_on_a_gpu(monkeypatch)
    engine = engine_of(llama, prefill_graph="breakable", enable_overlap=True)
    fill_with_nan(engine)
    params = [asking("all"), asking("last"), PLAIN]
    for output, each in zip(run_all(engine, prompts()[2:5], params), params, strict=True):
        llama.check(output, each)
    assert {entry["path"] for entry in engine.stats()["paths"]} == {"prefill_graph", "eager"}
    inner = asking("all", (1, -1))
    for output in run_all(engine, prompts()[2:4], [inner, inner]):
        llama.check(output, inner)
        assert output.paths == [("eager", 9)]
    assert "hidden states of inner layers are asked, which recorded segments" in refusals(engine)


def test_a_cpu_graph(llama_folder: Path) -> None:
    params = [asking("last"), PLAIN, asking("all")]  # three rows, padded to four
    expected = run_all(make_engine(llama_folder, cpu_graph="off"), prompts()[:3], params)
    engine = make_engine(llama_folder, cpu_graph="on", max_running_requests=4)
    fill_with_nan(engine)
    for ours, theirs in zip(run_all(engine, prompts()[:3], params), expected, strict=True):
        assert ours.paths[-1] == ("cpu_graph", 8)
        if theirs.hidden_states is None:
            assert ours.hidden_states is None
        else:
            found, known = ours.hidden_states.states, theirs.hidden_states.states
            assert torch.allclose(found, known, atol=1e-5)
    inner = asking("last", (0,))
    (output,) = run_all(engine, [prompts()[3]], [inner])
    assert output.paths == [("eager", 9)]
    assert "hidden states of inner layers are asked, which compiled pieces" in refusals(engine)


def fill_with_nan(engine: Engine) -> None:
    """All that no live row may read."""
    pool = engine.worker.runner.token_to_kv_pool
    for layer in range(pool.num_layers):
        for tensor in pool.key_value(layer):
            tensor.fill_(torch.nan)


def test_split_prefill_steps_run_whole(llama: Reference) -> None:
    engine = engine_of(llama, split_prefill_layers=1, max_model_len=400)
    params = [asking("last", max_tokens=20), asking("all", EVERY)]
    handles = [engine.add(prompts()[0], params[0])]
    engine.step()
    handles.append(engine.add(prompts()[5] * 6, params[1]))
    finish(engine, handles)
    for handle, each in zip(handles, params, strict=True):
        llama.check(handle.output(), each)
        assert handle.output().paths == [("eager", each.max_tokens)]
    facts = BatchFacts(
        mode=ForwardMode.EXTEND,
        tokens=300,
        live_tokens=300,
        sequences=1,
        max_length=300,
        hidden=HiddenMode.LAST,
        split=True,
    )
    why = map(str, engine.worker.runner.explain(facts).refused)
    assert "split_prefill: hidden states are asked, which a whole forward leaves" in why


def test_a_decode_graph_takes_what_its_graphs_keep() -> None:
    pytest.importorskip("triton")
    from headrace.execution.decode_graph import DecodeGraphPath
    from headrace.execution.kept_states import KeptStates

    path = object.__new__(DecodeGraphPath)  # the rest of it needs a GPU
    path.sizes, path._captured = (4,), {}
    facts = {"mode": ForwardMode.DECODE, "tokens": 1, "live_tokens": 1, "sequences": 1}
    kept = KeptStates((0, 2), 4, 8, dtype=torch.float32, device=torch.device("cpu"))
    for path._kept, layers, missing in (
        (None, (), ""),
        (None, (1,), "1"),
        (kept, (), ""),
        (kept, (0, 2), ""),
        (kept, (0, 1, 2, 3), "1,3"),
    ):
        answer = path.admits(BatchFacts(**facts, max_length=9, hidden_layers=layers))
        if missing:
            assert answer.reason.startswith(f"hidden states of layers {missing} are asked")
            assert answer.remedy == f"start with hidden_state_layers {missing}"
        else:
            assert answer.reason == "not captured yet"


def test_a_replay_leaves_copies_for_the_rows_that_ask() -> None:
    pytest.importorskip("triton")
    from headrace.execution.decode_graph import CapturedStep, DecodeGraphPath, StaticInputs
    from headrace.execution.kept_states import KeptStates

    path, device = object.__new__(DecodeGraphPath), torch.device("cpu")
    bucket = Bucket(tokens=4, sequences=4)
    hidden, inner = torch.randn(4, 8), torch.randn(4, 8)

    class Graph:
        def replay(self) -> None:
            step.hidden.copy_(hidden)
            path._kept.keep(1, inner)

    step = CapturedStep(graph=Graph(), logits=torch.zeros(4, 5), hidden=torch.zeros(4, 8))  # type: ignore[arg-type]
    path._captured, path._last_rows = {bucket: step}, ()
    path._inputs = StaticInputs(4, {}, device)
    path._kept = KeptStates((1,), 6, 8, dtype=torch.float32, device=device)
    batch = path._inputs.batch(3, 16)
    batch.bounds.rows[:] = [5, 6, 7]
    assert path.run(batch, bucket).hidden is None
    for layers, expected in (((), hidden[[2, 0], None]), ((1,), torch.stack((inner, hidden), 1))):
        index = torch.tensor([2, 0] if not layers else [0, 1, 2, 3])
        batch.side = SideRequest(hidden=HiddenStateRequest(token_index=index, layers=layers))
        found = path.run(batch, bucket).hidden.tokens
        step.hidden.fill_(torch.nan)  # as other graphs of the pool do
        path._kept.keep(1, torch.full((4, 8), torch.nan))
        assert torch.equal(found, expected)


# ---- endings


def finish(engine: Engine, handles: list[RequestHandle]) -> None:
    while not all(handle.is_finished for handle in handles):
        engine.step()
    engine.settle()


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


# ---- faces


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


# ---- taps


def test_who_taps_already_goes_on_to_see_the_stream(llama: Reference) -> None:
    engine, params = engine_of(llama), asking("all", (0, 2), max_tokens=1)
    model, seen = engine.worker.runner.model, []
    prompt = list(range(9))
    with model.tapped(lambda layer, stream: seen.append((layer, stream.clone()))):
        (output,) = run_all(engine, [prompt], [params])
    llama.check(output, params)
    assert [layer for layer, _ in seen] == [0, 1, 2]
    assert torch.allclose(seen[1][1], output.hidden_states.states[:, 1])
    assert model.model.taps == ()


def test_streams_in_parts_are_added_only_where_somebody_looks(
    llama: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, sums = decoder.added, []

    def counted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sums.append(x)
        return added(x, dtype)

    monkeypatch.setattr(decoder, "added", counted)
    engine = engine_of(llama)
    for params, count in ((PLAIN, 0), (asking("last"), 0), (asking("last", (0, 2, -1)), 9)):
        run_all(engine, [[1, 2, 3]], [params])
        assert len(sums) == count


# ---- nothing asked, nothing done


def test_steps_without_anybody_asking_launch_the_same_operators(llama: Reference) -> None:
    def operators(engine: Engine) -> list[str]:
        """Of a prompt and of some decode steps."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run_all(engine, [[1, 2, 3], [4, 5]], [PLAIN, PLAIN])
        return [event.name for event in profiler.events() if event.name.startswith("aten::")]

    untouched, asked = engine_of(llama), engine_of(llama)
    run_all(untouched, [[9, 8]], [PLAIN])
    run_all(asked, [[9, 8]], [asking("all", EVERY)])
    expected = operators(untouched)
    assert len(expected) > 200
    assert operators(asked) == expected
    assert asked.worker.runner.model.model.taps == ()
