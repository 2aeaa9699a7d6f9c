"""Threads that share an engine get their turn in time."""

import threading
import time

import pytest

from headrace.engine.turns import Turns


def test_a_waiting_thread_comes_before_the_one_that_just_left() -> None:
    turns, order = Turns(), []

    def wait_and_go() -> None:
        with turns:
            order.append("waited")

    for _ in range(50):
        waiting = threading.Thread(target=wait_and_go)
        with turns:
            waiting.start()
            deadline = time.monotonic() + 30
            while not turns._gate.locked():  # until it is the next one
                assert time.monotonic() < deadline
                time.sleep(0.0001)
        with turns:
            order.append("came back")
        waiting.join(30)
    assert order == ["waited", "came back"] * 50


def test_one_at_a_time_and_given_back_after_an_error() -> None:
    turns = Turns()

    def fail() -> None:
        with turns:
            assert not turns.take_if_free()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert turns.take_if_free()
    turns.give_back()
    with turns:
        pass
