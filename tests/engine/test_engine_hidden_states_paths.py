"""Hidden states on every path: which take a step that is asked for them, and what they leave."""

from pathlib import Path

import pytest
import torch
from operator_recorder import as_if_on_a_gpu
from state_cases import EVERY, PLAIN, Reference, asking, engine_of, prompts
from tiny_engine import make_engine, run_all

from headrace.batch.facts import BatchFacts, Bucket, HiddenMode
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.side_request import HiddenStateRequest, SideRequest
from headrace.engine.engine import Engine
from headrace.engine.requests import RequestHandle
from headrace.models import decoder


def fill_with_nan(engine: Engine) -> None:
    """All that no live row may read."""
    pool = engine.worker.runner.token_to_kv_pool
    for layer in range(pool.num_layers):
        for tensor in pool.key_value(layer):
            tensor.fill_(torch.nan)


def refusals(engine: Engine) -> str:
    return "; ".join(entry["refused"] for entry in engine.stats()["paths"])


def finish(engine: Engine, handles: list[RequestHandle]) -> None:
    while not all(handle.is_finished for handle in handles):
        engine.step()
    engine.settle()


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


def test_a_cpu_graph(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces run as they were traced: what is compiled is tested beside the compiler."""
    monkeypatch.setattr(
        "headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph
    )
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


def test_who_taps_already_goes_on_to_see_the_stream(llama: Reference) -> None:
    engine, params = engine_of(llama), asking("all", (0, 2), max_tokens=1)
    model, seen = engine.worker.runner.model, []
    prompt = list(range(9))
    with model.tapped(lambda layer, stream: seen.append((layer, stream.clone()))):
        (output,) = run_all(engine, [prompt], [params])
    llama.check(output, params)
    assert [layer for layer, _ in seen] == [0, 1, 2, 3]
    assert torch.allclose(seen[2][1], output.hidden_states.states[:, 1])
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
    for params, count in ((PLAIN, 0), (asking("last"), 0), (asking("last", (0, 2, -1)), 18)):
        run_all(engine, [[1, 2, 3]], [params])
        assert len(sums) == count
