"""Threads that share an engine get their turn in time."""

import statistics
import threading
import time

from headrace.engine.turns import Turns


def test_a_waiting_thread_comes_before_the_one_that_just_left() -> None:
    turns, stop = Turns(), threading.Event()
    taken = 0
    between: list[int] = []  # turns of the other thread while this one waited

    def loop() -> None:
        nonlocal taken
        while not stop.is_set():
            with turns:
                taken += 1
                sum(range(20_000))  # a step that never lets go of the interpreter by itself

    def ask() -> None:
        for _ in range(20):
            before = taken
            with turns:
                between.append(taken - before)
            time.sleep(0.005)  # the other one is at it again

    looping, asking = threading.Thread(target=loop), threading.Thread(target=ask)
    looping.start()
    asking.start()
    asking.join(60)
    stop.set()
    looping.join(60)
    assert len(between) == 20
    assert statistics.median(between) <= 2  # some 400 with a plain lock


def test_one_at_a_time_and_given_back_after_an_error() -> None:
    turns = Turns()
    try:
        with turns:
            assert not turns.take_if_free()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert turns.take_if_free()
    turns.give_back()
    with turns:
        pass
