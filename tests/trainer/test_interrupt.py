import signal
import threading

import pytest

from verl.trainer.interrupt import Interrupt


@pytest.fixture(autouse=True)
def terminal():
    """SIGINT as a terminal's programs have it; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_first_signal_asks_and_the_second_strikes(capsys):
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        assert "finishing this step" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_asks_too_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_it_changes_nothing():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with Interrupt() as interrupt:
            seen.append((interrupt.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_an_attempt_is_ended_by_the_first_signal_and_not_begun_after_one(capsys):
    done = []

    def work():
        done.append("begun")
        signal.raise_signal(signal.SIGINT)
        done.append("more")

    with Interrupt() as interrupt:
        assert interrupt.attempt(lambda: 7) == 7
        assert interrupt.attempt(work) is None
        assert (done, interrupt.requested) == (["begun"], True)
        assert "leaving the validation" in capsys.readouterr().err
        assert interrupt.attempt(work) is None
        assert done == ["begun"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_attempts_own_failure_is_its_callers():
    with Interrupt() as interrupt:
        with pytest.raises(ZeroDivisionError):
            interrupt.attempt(lambda: 1 / 0)
        signal.raise_signal(signal.SIGTERM)  # is not the attempt's any more
        assert interrupt.requested
