"""Random schedules over the symbolic model: right tokens, one ending each, no page lost."""

import random
from itertools import product

import pytest
from symbolic_model import (
    VOCAB,
    Recorder,
    expected_output,
    expected_state,
    symbolic_scheduler,
)

from headrace.base.errors import RequestError
from headrace.request.outcome import Finished
from headrace.request.pooling_params import PoolingParams
from headrace.request.request import Request
from headrace.request.sampling_params import SamplingParams
from headrace.scheduler.admission import Admission
from headrace.scheduler.scheduler import Scheduler


def submit(
    scheduler: Scheduler,
    name: str,
    prompt: list[int],
    max_tokens: int,
    *,
    stops: frozenset[int] = frozenset(),
    n: int = 1,
    priority: int = 0,
    salt: str = "",
) -> list[Recorder]:
    sinks = [Recorder() for _ in range(n)]
    params = SamplingParams(temperature=0.0, n=n)
    request = Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=params,
        priority=priority,
        cache_salt=salt,
    )
    scheduler.add(request, max_tokens, stops, [Admission(sink=sink) for sink in sinks])
    return sinks


def embed(scheduler: Scheduler, name: str, prompt: list[int], pooling: str) -> Recorder:
    sink = Recorder()
    params = PoolingParams(pooling=pooling, normalize=False)
    request = Request(request_id=name, prompt_token_ids=prompt, pooling=params)
    scheduler.add(request, 0, frozenset(), [Admission(sink=sink)])
    return sink


def run(scheduler: Scheduler, limit: int = 5000) -> None:
    ongoing = None
    for _ in range(limit):
        ongoing = scheduler.loop(ongoing)
        if ongoing is None and not scheduler.has_work:
            return
    raise AssertionError("the scheduler makes no progress")


def used_pages(scheduler: Scheduler) -> int:
    """Those of sequences and of the prefix cache."""
    return scheduler.keeper.allocator.total - scheduler.keeper.allocator.available


def assert_all_pages_free(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    assert not scheduler.chooser.running
    assert not len(scheduler.chooser.waiting)
    scheduler.keeper.cache.clear()
    assert scheduler.keeper.allocator.available == scheduler.keeper.allocator.total


@pytest.mark.parametrize("seed", range(60))
def test_random_schedule(seed: int) -> None:
    draw = random.Random(seed)
    scheduler = symbolic_scheduler(
        pages=draw.choice([18, 24, 60]),
        page_size=draw.choice([1, 2, 4, 8]) if seed % 3 else 4,
        chunk=draw.choice([1, 5, 16]),
        max_running=draw.choice([1, 3, 6]),
        overlap=bool(seed % 2),
        prefix_cache=draw.random() < 0.7,
        retract_every=draw.choice([0, 0, 3]),
        kv_canary="raise" if seed % 4 == 0 else "off",  # nothing here may alarm it
        sweep_interval=3 if seed % 8 == 0 else 0,
    )
    stems = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))] for _ in range(3)]
    submitted: dict[str, tuple[list[Recorder], list[int], int, frozenset[int]]] = {}
    aborted: set[str] = set()
    ongoing = None
    arrivals = draw.randint(5, 25)
    for turn in range(5000):
        if arrivals and draw.random() < 0.4:
            arrivals -= 1
            name = f"r{arrivals}"
            prompt = draw.choice(stems) + [draw.randrange(VOCAB) for _ in range(draw.randint(0, 5))]
            max_tokens = draw.randint(1, 20)
            stops = frozenset(draw.sample(range(VOCAB), draw.choice([0, 6])))
            try:
                sinks = submit(
                    scheduler,
                    name,
                    prompt,
                    max_tokens,
                    stops=stops,
                    n=draw.choice([1, 1, 3]),
                    priority=draw.choice([0, 0, 1]),
                    salt=draw.choice(["", "", "other"]),
                )
            except RequestError:
                assert len(prompt) + max_tokens - 1 > scheduler.keeper.capacity_tokens
                continue
            submitted[name] = (sinks, prompt, max_tokens, stops)
        if submitted and draw.random() < 0.03:
            victim = draw.choice(sorted(submitted))
            if scheduler.abort(victim):
                aborted.add(victim)
        ongoing = scheduler.loop(ongoing)
        if turn % 7 == 0:
            scheduler.check_integrity()
        if ongoing is None and not scheduler.has_work and not arrivals:
            break
    else:
        raise AssertionError("the scheduler makes no progress")
    for name, (sinks, prompt, max_tokens, stops) in submitted.items():
        for sink in sinks:
            assert len(sink.endings) == 1, f"{name} ended {len(sink.endings)} times"
            expected = expected_output(prompt, max_tokens, stops)
            if sink.endings[0].reason == "abort":
                assert name in aborted
                assert sink.tokens == expected[: len(sink.tokens)]
                continue
            assert sink.tokens == expected
            reason = "stop" if expected[-1] in stops else "length"
            assert sink.endings[0] == Finished(reason)
    assert_all_pages_free(scheduler)


@pytest.mark.parametrize("seed", range(24))
def test_random_schedule_with_embeddings(seed: int) -> None:
    draw = random.Random(1000 + seed)
    scheduler = symbolic_scheduler(
        pages=draw.choice([18, 30]),
        page_size=draw.choice([1, 2, 4]),
        chunk=draw.choice([1, 5, 16]),
        max_running=draw.choice([2, 6]),
        overlap=bool(seed % 2),
        prefix_cache=draw.random() < 0.7,
        retract_every=draw.choice([0, 3]),
    )
    stems = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 10))] for _ in range(2)]
    embedded: list[tuple[str, Recorder, list[int], str]] = []
    generated: list[tuple[Recorder, list[int], int]] = []
    aborted: set[str] = set()
    ongoing = None
    for turn in range(5000):
        if turn < 40 and draw.random() < 0.6:
            prompt = draw.choice(stems) + [draw.randrange(VOCAB) for _ in range(draw.randint(0, 6))]
            name = f"r{turn}"
            if draw.random() < 0.6:
                pooling = draw.choice(["last", "mean"])
                sink = embed(scheduler, name, prompt, pooling)
                embedded.append((name, sink, prompt, pooling))
            elif len(prompt) + 2 <= scheduler.keeper.capacity_tokens:
                most = min(20, scheduler.keeper.capacity_tokens - len(prompt))
                generated.append((submit(scheduler, name, prompt, most)[0], prompt, most))
        if embedded and draw.random() < 0.05:
            victim = draw.choice(embedded)[0]
            if scheduler.abort(victim):
                aborted.add(victim)
        ongoing = scheduler.loop(ongoing)
        scheduler.check_integrity()
        if turn >= 40 and ongoing is None and not scheduler.has_work:
            break
    else:
        raise AssertionError("the scheduler makes no progress")
    for name, sink, prompt, pooling in embedded:
        assert not sink.tokens
        (ending,) = sink.endings
        if name in aborted:
            assert (ending.reason, sink.vector) == ("abort", None)
            continue
        assert ending == Finished("stop")
        assert sink.vector is not None
        assert sink.vector.tolist() == pytest.approx([expected_state(prompt, pooling)])
    for sink, prompt, most in generated:
        assert sink.tokens == expected_output(prompt, most, frozenset())
    assert_all_pages_free(scheduler)


@pytest.mark.parametrize("overlap", [False, True])
def test_tiny_pool_retracts_and_every_answer_is_whole(overlap: bool) -> None:
    # The output of a request preempted for memory was incomplete.
    scheduler = symbolic_scheduler(pages=15, overlap=overlap)  # 1.5 requests of 40 tokens
    sinks = [submit(scheduler, f"r{i}", [i, i + 1], 40)[0] for i in range(4)]
    run(scheduler)
    for index, sink in enumerate(sinks):
        assert sink.tokens == expected_output([index, index + 1], 40, frozenset())
    assert scheduler.chooser.retractions > 0
    assert_all_pages_free(scheduler)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_computed_twice_does_not_stop_the_one_that_goes_on(overlap: bool) -> None:
    # Both compute it in one step. The cache keeps the pages of the first, the second reads its own.
    scheduler = symbolic_scheduler(pages=18, page_size=1, overlap=overlap)
    prompt = list(range(7))
    sinks = [submit(scheduler, f"r{most}", prompt, most)[0] for most in (1, 12)]
    run(scheduler)
    for sink, most in zip(sinks, (1, 12), strict=True):
        assert sink.tokens == expected_output(prompt, most, frozenset())
    assert_all_pages_free(scheduler)


@pytest.mark.parametrize(("overlap", "page_size"), list(product([False, True], [1, 4])))
def test_prompt_cached_in_full_recomputes_its_last_token(overlap: bool, page_size: int) -> None:
    # A fully cached prompt of whole pages left a query of length 0.
    scheduler = symbolic_scheduler(pages=40, page_size=page_size, overlap=overlap)
    prompt = list(range(8))
    for name in ("first", "again"):
        sink = submit(scheduler, name, prompt, 3)[0]
        run(scheduler)
        assert sink.tokens == expected_output(prompt, 3, frozenset())
    hits = scheduler.keeper.hit_tokens
    assert hits == (7 if page_size == 1 else 4)


def test_sequences_of_one_request_share_the_prompts_pages() -> None:
    for prefix_cache in (True, False):
        scheduler = symbolic_scheduler(pages=40, prefix_cache=prefix_cache, max_running=4)
        sinks = submit(scheduler, "three", list(range(17)), 3, n=3)
        most = 0
        ongoing = None
        while scheduler.has_work:
            ongoing = scheduler.loop(ongoing)
            most = max(most, used_pages(scheduler))
        assert {tuple(sink.tokens) for sink in sinks} == {
            tuple(expected_output(list(range(17)), 3, frozenset()))
        }
        assert most == 4 + 3, "four shared pages, and one for each sequence's own end"
        if not prefix_cache:
            assert used_pages(scheduler) == 0, "the namespace ends with the request"


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    scheduler = symbolic_scheduler(pages=40, prefix_cache=False)
    for name in ("a", "b"):
        submit(scheduler, name, list(range(12)), 2)
        run(scheduler)
    assert used_pages(scheduler) == 0
    assert scheduler.keeper.hit_tokens == 0


def test_failing_step_ends_its_sequences_and_nobody_else() -> None:
    for overlap in (False, True):
        scheduler = symbolic_scheduler(pages=40, overlap=overlap)
        broken = submit(scheduler, "broken", [1, 2, 3], 5)[0]
        scheduler.worker.runner.model.fails_next = True
        ongoing = scheduler.loop(None)
        assert [ending.reason for ending in broken.endings] == ["error"]
        assert "injected fault" in broken.endings[0].message
        fine = submit(scheduler, "fine", [4, 5], 5)[0]
        while scheduler.has_work or ongoing is not None:
            ongoing = scheduler.loop(ongoing)
        assert fine.tokens == expected_output([4, 5], 5, frozenset())
        assert_all_pages_free(scheduler)


def test_prompts_that_can_never_fit_are_refused_and_block_nobody() -> None:
    scheduler = symbolic_scheduler(pages=10)  # 40 tokens
    with pytest.raises(RequestError, match="KV pool holds 40 tokens"):
        submit(scheduler, "long", [1] * 41, 1)
    with pytest.raises(RequestError, match="KV pool"):
        submit(scheduler, "long", [1] * 30, 12)
    exact = submit(scheduler, "exact", [1] * 40, 1)[0]
    also = submit(scheduler, "also", [1] * 30, 11)[0]
    run(scheduler)
    assert exact.endings == also.endings == [Finished("length")]
    with pytest.raises(RequestError, match="130 together"):
        submit(symbolic_scheduler(pages=100), "context", [1] * 120, 10)


def test_priority_runs_first_and_a_retracted_sequence_keeps_its_place() -> None:
    scheduler = symbolic_scheduler(pages=40, max_running=1)
    order: list[str] = []
    for name, priority in (("low", 0), ("high", 5), ("later", 0)):
        sink = submit(scheduler, name, [1, 2], 2, priority=priority)[0]
        sink.finished = lambda ending, name=name: order.append(name)  # type: ignore[method-assign]
    run(scheduler)
    assert order == ["high", "low", "later"]


def test_abort_of_unknown_finished_and_waiting_requests() -> None:
    scheduler = symbolic_scheduler(pages=20, max_running=1)
    assert not scheduler.abort("unknown")
    running, waiting = (submit(scheduler, name, [3, 4], 4)[0] for name in ("running", "waiting"))
    scheduler.loop(None)
    assert scheduler.abort("waiting")
    assert not scheduler.abort("waiting")
    run(scheduler)
    assert not scheduler.abort("running")
    assert waiting.endings[0].reason == "abort"
    assert running.endings == [Finished("length")]
    assert_all_pages_free(scheduler)


def test_salts_do_not_share() -> None:
    scheduler = symbolic_scheduler(pages=40)
    for salt in ("", "tenant", "tenant"):
        submit(scheduler, f"salt {salt!r} {random.random()}", list(range(9)), 1, salt=salt)
        run(scheduler)
    assert scheduler.keeper.hit_tokens == 8
