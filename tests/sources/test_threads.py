"""Sharing work out among threads."""

import threading
import time

import pytest

from slimckpt.sources.threads import share_out


@pytest.mark.parametrize("threads", [0, 1, 4, 50])
def test_every_item_is_worked_on_once(threads: int) -> None:
    seen: list[int] = []
    share_out(seen.append, range(1000), threads)
    assert sorted(seen) == list(range(1000))


def test_the_callers_thread_and_others_work_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=10)
    who: set[threading.Thread] = set()

    def work(item: int) -> None:
        together.wait()
        who.add(threading.current_thread())

    share_out(work, range(3), 3)
    assert len(who) == 3 and threading.current_thread() in who
    assert all(thread.daemon for thread in who - {threading.main_thread()})


def test_without_threads_to_be_had_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen: list[int] = []
    share_out(seen.append, range(5), 4)
    assert seen == list(range(5))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_nothing_more_is_begun_and_nothing_goes_on(
    error: type[BaseException],
) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 3:
            raise error("three")
        time.sleep(0.02)
        ended.append(item)

    with pytest.raises(error, match="three"):
        share_out(work, range(1000), 4)
    assert len(begun) < 20
    assert sorted([*ended, 3]) == sorted(begun)
    time.sleep(0.1)
    assert sorted([*ended, 3]) == sorted(begun)


def test_an_error_of_the_items_is_raised_too() -> None:
    def items():  # type: ignore[no-untyped-def]
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        share_out(lambda item: None, items(), 3)
