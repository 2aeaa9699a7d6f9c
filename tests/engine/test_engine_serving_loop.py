"""The loop of the engine's process over a link that says its lines: drains, deadlines, signals."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import SHORT, request
from tiny_engine import make_engine

from headrace.engine.process import loop
from headrace.engine.process.loop import QUIET_SECONDS, ServingLoop
from headrace.request.messages import Abort, Draining, FromEngine, Refused, Stop, ToEngine, Turn
from headrace.request.sampling_params import SamplingParams

FOREVER = SamplingParams(max_tokens=200, ignore_eos=True, n=2)

Said = list[ToEngine] | Callable[[], None]


class ScriptedLink:
    """Gives one entry of the script to each turn, then nothing for as many as are asked for."""

    def __init__(self, *script: Said) -> None:
        self.stop_signals = 0
        self.sent: list[FromEngine] = []
        self._script: Iterator[Said] = iter(script)
        self._silent_turns = 0

    def receive(self, wait: float | None) -> list[ToEngine]:
        said = next(self._script, None)
        if said is None:
            self._silent_turns += 1
            assert self._silent_turns < 1000, "the loop does not end"
            assert wait is not None, "the loop sleeps for ever"
            return []
        if callable(said):
            said()
            return []
        return said

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def signal(self) -> None:
        self.stop_signals += 1

    def endings(self) -> list[tuple[str, int, str, str]]:
        return [
            (delta.request_id, delta.index, delta.finished.reason, delta.finished.message)
            for turn in self.sent
            if isinstance(turn, Turn)
            for delta in turn.deltas
            if delta.finished is not None
        ]


def serve(
    folder: Path,
    link: ScriptedLink,
    prepare: Callable[[], bool] | None = None,
    **options: Any,
) -> ScriptedLink:
    """`prepare`: takes the place of the engine's captures in idle moments, of which a CPU has
    none."""
    engine = make_engine(folder, **options)
    if prepare is not None:
        monitored = engine.worker.runner
        monitored.prepare_in_idle = prepare  # type: ignore[method-assign]
    ServingLoop(engine, link).run()  # type: ignore[arg-type]
    assert not engine.has_work
    engine.scheduler.check_integrity()
    return link


def test_a_drain_lets_requests_end_and_takes_no_new_ones(llama_folder: Path) -> None:
    first = request(request_id="first", params=SHORT)
    late = request(request_id="late", params=SHORT)
    link = serve(llama_folder, ScriptedLink([first], [Stop(60.0)], [late]))
    assert link.endings() == [("first", 0, "length", "")]
    assert [type(message) for message in link.sent].count(Draining) == 1
    (refused,) = [message for message in link.sent if isinstance(message, Refused)]
    assert (refused.request_id, refused.failure.kind) == ("late", "UnavailableError")


@pytest.mark.parametrize("how", ["deadline", "second signal", "signal and stop"])
def test_what_is_left_at_the_end_of_a_drain_is_aborted(llama_folder: Path, how: str) -> None:
    link = ScriptedLink()
    ways: dict[str, list[Said]] = {
        "deadline": [[Stop(0.0)]],
        "second signal": [link.signal, link.signal],
        "signal and stop": [link.signal, [Stop(0.0)]],
    }
    script: list[Said] = [[request(request_id="r", params=FOREVER)], [], *ways[how]]
    link._script = iter(script)
    serve(llama_folder, link)
    stopped = ("abort", "the engine was stopped")
    assert sorted(link.endings()) == [("r", 0, *stopped), ("r", 1, *stopped)]
    assert [type(message) for message in link.sent].count(Draining) == 1


def test_a_signal_alone_leaves_the_deadline_to_the_face(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd signals every process of a service at once."""
    now = iter(range(0, 10**6, 60))  # a minute at each look
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(now)))
    link = ScriptedLink()
    link._script = iter([[request(request_id="r", params=SHORT)], link.signal])
    assert serve(llama_folder, link).endings() == [("r", 0, "length", "")]


def test_an_idle_engine_stops_at_once(llama_folder: Path) -> None:
    assert serve(llama_folder, ScriptedLink([Stop(60.0)])).endings() == []


def test_who_comes_and_goes_in_one_turn_ends_once_per_continuation(llama_folder: Path) -> None:
    submit = request(request_id="r", params=FOREVER)
    link = serve(llama_folder, ScriptedLink([submit, Abort(["r"])], [Abort(["r"])], [Stop(0.0)]))
    aborted = ("abort", "aborted by the caller")
    assert link.endings() == [("r", 0, *aborted), ("r", 1, *aborted)]


def test_a_turn_is_one_message_with_the_load_after_it(llama_folder: Path) -> None:
    submits: list[ToEngine] = [request(params=SHORT) for _ in range(4)]
    link = serve(llama_folder, ScriptedLink(submits, [Stop(60.0)]))
    turns = [message for message in link.sent if isinstance(message, Turn)]
    assert all(len(turn.deltas) == 4 for turn in turns)
    accepted, *steps = turns
    assert all((each.token_ids, each.prompt_tokens) == ([], 3) for each in accepted.deltas)
    assert all(each.token_ids for turn in steps for each in turn.deltas)
    last = turns[-1].load
    assert (last.running, last.waiting) == (0, 0)
    assert last.pages_free + last.pages_cached == last.pages_total
    assert turns[1].load.running == 4


def test_steps_without_news_still_show_life(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a long prompt, of which the face would hear nothing."""
    monkeypatch.setattr(loop, "SIGN_SECONDS", 0.0)
    submit = request([1, 2, 3] * 20, SHORT)
    link = serve(llama_folder, ScriptedLink([submit], [Stop(60.0)]), chunked_prefill_size=16)
    signs = [len(message.deltas) for message in link.sent if isinstance(message, Turn)]
    assert signs[:4] == [1, 0, 0, 0]
    idle = serve(llama_folder, ScriptedLink([], [Stop(60.0)]))
    assert not [message for message in idle.sent if isinstance(message, Turn)]


def test_graphs_are_captured_one_by_one_while_nobody_asks_for_anything(llama_folder: Path) -> None:
    seen: list[int] = []
    request_and_silence: list[Said] = [[request(request_id="r", params=SHORT)], *[[]] * 14]
    link = ScriptedLink([], *request_and_silence, [Stop(60.0)])

    def prepare() -> bool:
        seen.append(len(link.endings()))
        return len(seen) < 3

    serve(llama_folder, link, prepare)
    assert [reason for _, _, reason, _ in link.endings()] == ["length"]
    assert seen[0] == 0  # before the request came
    assert seen[1:] == [1] * len(seen[1:])  # and only once it had ended
    assert len(seen) == 3  # then there was nothing more


def test_who_asks_again_at_once_waits_for_no_capture(llama_folder: Path) -> None:
    seen: list[int] = []

    class Hasty(ScriptedLink):
        """Its second request comes while the engine waits for one, after the first has ended."""

        def receive(self, wait: float | None) -> list[ToEngine]:
            if wait == QUIET_SECONDS and not self.hurried:
                self.hurried = True
                return [request(request_id="second", params=SHORT)]
            return super().receive(wait)

        hurried = False

    link = Hasty([request(request_id="first", params=SHORT)], *[[]] * 30, [Stop(60.0)])

    def prepare() -> bool:
        seen.append(len(link.endings()))
        return True

    serve(llama_folder, link, prepare)
    assert link.hurried
    assert [name for name, *_ in link.endings()] == ["first", "second"]
    assert set(seen) == {2}


def test_a_capture_that_fails_ends_the_captures_and_nothing_else(llama_folder: Path) -> None:
    tried: list[int] = []

    def prepare() -> bool:
        tried.append(1)
        raise MemoryError("no room for a graph")

    link = ScriptedLink([], [], [request(request_id="r", params=SHORT)], [Stop(60.0)])
    serve(llama_folder, link, prepare)
    assert [reason for _, _, reason, _ in link.endings()] == ["length"]
    assert tried == [1]
