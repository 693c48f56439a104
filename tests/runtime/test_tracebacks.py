"""Tracebacks of many ranks in one log: `runtime/nodes/supervisor/ranks`."""

from batchml.runtime.nodes.supervisor.ranks import TracebackFolder

TRACEBACK = [
    b"Traceback (most recent call last):", b'  File "train.py", line 4, in main', b"    main()",
    b"KeyError: 'loss'",
]  # fmt: skip


def test_the_first_rank_prints_its_traceback_and_the_others_a_line() -> None:
    folder = TracebackFolder()
    assert folder.feed(1, [b"epoch 1", *TRACEBACK[:2]]) == [b"epoch 1"]
    assert folder.feed(0, [b"epoch 1"]) == [b"epoch 1"]
    assert folder.feed(1, TRACEBACK[2:]) == TRACEBACK
    line = b"KeyError: 'loss' (the same traceback as rank 1 above)"
    assert folder.feed(3, [*TRACEBACK, b"bye"]) == [line, b"bye"]
    assert folder.feed(1, TRACEBACK) == [line]  # in the next start


def test_the_labels_of_torch_do_not_make_tracebacks_different() -> None:
    folder = TracebackFolder()
    labelled = [[b"[rank%d]: " % rank + line for line in TRACEBACK] for rank in (0, 1)]
    assert folder.feed(0, labelled[0]) == labelled[0]
    assert len(folder.feed(1, labelled[1])) == 1


def test_another_error_is_printed() -> None:
    folder = TracebackFolder()
    folder.feed(0, TRACEBACK)
    other = [*TRACEBACK[:3], b"KeyError: 'lr'"]
    assert folder.feed(1, other) == other


def test_a_traceback_in_which_a_rank_is_ended_is_printed_unless_it_is_known() -> None:
    folder = TracebackFolder()
    folder.feed(0, TRACEBACK[:2])
    assert folder.finish(0) == TRACEBACK[:2]
    folder.feed(0, TRACEBACK)
    folder.feed(1, TRACEBACK[:2])
    assert folder.finish(1) == folder.finish(7) == []


def test_a_traceback_without_an_end_is_printed_before_it_is_too_long() -> None:
    endless = [TRACEBACK[0], *(b"  line %d" % number for number in range(1000))]
    assert TracebackFolder().feed(0, endless) == endless
