"""Threads for questions."""

import threading
from functools import partial

from batchml.dashboard.server.workers import Workers


def test_work_is_done_on_few_threads_that_do_not_keep_the_process() -> None:
    workers, names, go = Workers(3), set[int](), threading.Event()

    def note(number: int) -> int:
        names.add(threading.get_ident())
        go.wait(30)
        assert threading.current_thread().daemon
        return number

    found = [workers.submit(partial(note, number)) for number in range(20)]
    go.set()
    assert [each.result(30) for each in found] == list(range(20)) and len(names) <= 3


def test_an_error_is_the_result_and_the_thread_goes_on() -> None:
    workers = Workers(1)

    def fail() -> None:
        raise ValueError("x")

    assert isinstance(workers.submit(fail).exception(30), ValueError)
    assert workers.submit(lambda: 7).result(30) == 7


def test_work_that_waits_does_not_keep_other_work_below_the_limit() -> None:
    workers, go = Workers(2), threading.Event()
    waiting = workers.submit(lambda: go.wait(30))
    assert workers.submit(lambda: 7).result(30) == 7
    go.set()
    assert waiting.result(30)
