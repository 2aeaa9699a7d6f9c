"""`bench step` on a tiny model: what it measures and what it refuses."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.base.errors import CapacityError, ConfigError, HeadraceError
from headrace.bench.ceilings import Ceilings
from headrace.bench.contestants import Headrace
from headrace.bench.decoding import Decoding, check_room
from headrace.bench.floor import decode_floor, prefill_floor
from headrace.bench.step import Decode, Prefill, Steady, StepBench, StepWork
from headrace.bench.step_table import table
from headrace.bench.trace import TraceReport
from headrace.llm import LLM

F32 = {"dtype": "float32", "kv_dtype": "float32"}
CEILINGS = Ceilings(bandwidth=1e10, matrix_rate=1e11, dtype="float32", how="given")
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1], [5] * 8]


@pytest.fixture(scope="module", params=[False, True], ids=["in order", "overlap"])
def llm(dummy_model: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        dummy_model,
        load_format="dummy",
        device="cpu",
        enable_prefix_cache=False,
        enable_overlap=request.param,
        chunked_prefill_size=16,
        max_running_requests=8,
        max_total_tokens=1024,
    ) as model:
        yield model


def test_every_row_decodes_in_a_measured_turn(llm: LLM) -> None:
    # 24 prompt tokens in steps of 16: early rows decode while a late prompt is read
    before = llm.stats()
    with Decoding(
        llm, PROMPTS, [{}, {"top_p": 0.9, "temperature": 1.0}, {"logprobs": 2}], 5
    ) as rows:
        started = rows.context
        made = llm.stats()["output_tokens"]
        assert all(rows.turn() > 0 for _ in range(5))
        assert rows.context == pytest.approx(started + 5)
        assert llm.stats()["output_tokens"] == made + 15
        assert started == pytest.approx(8 + (made - before.get("output_tokens", 0)) / 3)
        assert llm.stats()["prompt_tokens"] == before.get("prompt_tokens", 0) + 24
    after = llm.stats()
    assert (after["running"], after["waiting"]) == (0, 0)
    assert after["pages_free"] == before["pages_free"]
    assert after["finished_abort"] == before.get("finished_abort", 0) + 3


def test_rows_that_end_early_are_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("broken kernel")

    monkeypatch.setattr(llm.engine.worker, "forward_batch_generation", fail)
    with pytest.raises(HeadraceError, match="broken kernel"), Decoding(llm, PROMPTS, [{}] * 3, 5):
        pass
    with pytest.raises(HeadraceError, match="broken kernel"):
        Headrace(llm).run(PROMPTS, 2)
    assert llm.stats()["running"] == 0


def test_a_batch_that_cannot_run_at_once_is_refused(llm: LLM) -> None:
    check_room(llm, 8, 128)
    with pytest.raises(ConfigError, match="--max-running-requests 9"):
        check_room(llm, 9, 10)
    with pytest.raises(CapacityError, match="8 with 129 tokens"):
        check_room(llm, 8, 129)
    with pytest.raises(ConfigError, match="context holds 256 tokens"):
        check_room(llm, 1, 257)
    with pytest.raises(CapacityError, match="8 with 166 tokens"):
        StepBench(llm, StepWork(batches=(8,), context=84), CEILINGS)
    with pytest.raises(ConfigError, match="batch of 9"):
        StepBench(llm, StepWork(batches=(1,), prefills=(9,), context=8), CEILINGS)


def test_decode_and_prefill_beside_their_floors(llm: LLM) -> None:
    work = StepWork(batches=(2,), prefills=(2, 3), context=8, output_len=5, repeats=3)
    decode, same, other = StepBench(llm, work, CEILINGS).measure()
    assert isinstance(decode, Decode)
    assert isinstance(same, Prefill)
    assert isinstance(other, Prefill)
    traits = llm.explain().persona.traits
    assert len(decode.short) == len(decode.long) == 3
    assert decode.context == 8 + 2.5
    floor = decode_floor(traits, batch=2, context=10.5, **F32).seconds(CEILINGS)
    assert decode.floor == pytest.approx(floor)
    steady = decode.steady
    assert len(steady.seconds) == 32
    assert steady.paths == {"eager": 32}
    assert steady.refused[0].startswith("decode_graph: ")
    floor = decode_floor(traits, batch=2, context=steady.context, **F32).seconds(CEILINGS)
    assert steady.floor == pytest.approx(floor)
    assert steady.trace is None  # there is no GPU
    assert decode.mixed_trace is None
    assert same.seconds == decode.short  # measured once
    assert same.paths["eager"] >= 3
    assert set(other.paths) == {"eager"}
    assert (other.prompts, other.length, len(other.seconds)) == (3, 8, 3)
    floor = prefill_floor(traits, prompts=3, length=8, **F32).seconds(CEILINGS)
    assert other.floor == pytest.approx(floor)


def test_turns_that_ask_for_hidden_states_stand_beside_the_others(llm: LLM) -> None:
    work = StepWork(batches=(2,), context=8, output_len=5, repeats=1, hidden_states="last")
    (decode,) = StepBench(llm, work, CEILINGS).measure()
    assert isinstance(decode, Decode)
    assert decode.states is not None
    assert len(decode.states.seconds) == 32
    assert decode.states.paths == {"eager": 32}
    assert decode.as_dict()["states_seconds"] == decode.states.median
    (line,) = [line for line in table([decode]).splitlines() if "hidden states" in line]
    assert line.startswith("  2: every row with hidden states: steady ")
    assert line.endswith("gap -, eager x32")


def decode_result() -> Decode:
    trace = TraceReport(turns=20, gaps=(3.0, 4.0, 50.0), calls={"cudaEventSynchronize": 20})
    steady = Steady(
        seconds=(0.004, 0.006, 0.005),
        context=1050.0,
        floor=0.0025,
        paths={"decode_graph": 32},
        refused=("cpu_graph: a GPU is used",),
        trace=trace,
    )
    return Decode(
        batch=32,
        prompt_len=1024,
        output_len=64,
        short=(0.7, 0.9, 0.8),
        long=(1.43, 1.3, 9.0),
        context=1056.0,
        floor=0.002,
        steady=steady,
        mixed_trace=TraceReport(turns=20, gaps=(9.25,), calls={"cudaMalloc": 1}),
    )


def test_step_time_is_the_difference_of_medians() -> None:
    decode = decode_result()
    assert decode.step == pytest.approx((1.43 - 0.8) / 63)
    line = decode.as_dict()
    assert line["kind"] == "decode"
    assert line["ratio"] == pytest.approx(5.0)
    assert line["steady_ratio"] == pytest.approx(2.0)
    assert line["trace"]["gap_us"] == 4.0
    assert line["mixed_trace"]["longest_gap_us"] == 9.25


def test_a_table_without_traces_has_no_gaps_and_fits() -> None:
    steady = replace(
        decode_result().steady,
        trace=None,
        paths={"eager": 32},
        refused=("cpu_graph: " + "nobody measured whether it pays on this CPU, " * 3,),
    )
    shown = table([replace(decode_result(), steady=steady, mixed_trace=None)], width=80)
    assert "gap" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_table() -> None:
    prefill = Prefill(
        prompts=32, length=1024, seconds=(0.8, 0.7, 0.9), floor=0.4, paths={"prefill_graph": 3}
    )
    assert prefill.as_dict()["ratio"] == pytest.approx(2.0)
    lines = table([decode_result(), prefill]).splitlines()
    cells = ["32", "1056", "10.000", "2.000", "5.00", "5.000", "2.00", "4.0", "9.2"]
    assert lines[1].split() == [*cells, "decode_graph", "x32"]
    assert [line.strip() for line in lines[2:5]] == [
        "32: not cpu_graph: a GPU is used",
        "32: in 20 turns cudaEventSynchronize 20",
        "32, mixed: in 20 turns cudaMalloc 1",
    ]
    cells = ["32", "1024", "800.00", "400.00", "2.00", "40,960", "prefill_graph", "x3"]
    assert lines[6].split() == cells
