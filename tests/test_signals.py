"""Requests to stop: the first signal is kept, a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from workbench.signals import InterruptedRunError, StopRequests


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """The signals are heard, also where the tests run in the background of a shell."""
    numbers = {signal.SIGINT: signal.default_int_handler}
    numbers |= dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_a_request(number: signal.Signals) -> None:
    with StopRequests() as stop:
        stop.check()
        send(number)
        with pytest.raises(InterruptedRunError, match=number.name) as caught:
            stop.check()
    assert caught.value.number == number


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_stays_the_reason(first: signal.Signals) -> None:
    with StopRequests() as stop:
        send(first)
        send(signal.SIGTERM)
        assert stop.number == first


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_ctrl_c_after_any_request_ends_at_once(first: signal.Signals) -> None:
    with StopRequests():
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_the_signals_are_given_back_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequests() as stop:
        assert signal.getsignal(signal.SIGINT) != before
        send(signal.SIGINT)
        assert stop.has_come
    assert signal.getsignal(signal.SIGINT) == before


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequests() as stop:
        send(signal.SIGINT)
        stop.check()
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert stop.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_what_was_answered_is_no_request_any_more() -> None:
    with StopRequests() as stop:
        send(signal.SIGTERM)
        stop.forget()
        stop.check()
        assert not stop.has_come
        send(signal.SIGUSR1)
        assert stop.number == signal.SIGUSR1
