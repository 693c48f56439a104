"""Processes that record at the same time."""

import json
import multiprocessing
from pathlib import Path

from batchml.aws.recording import RecordingFile

LINES, PROCESSES = 40, 4


def append(path: str, number: int) -> None:
    file = RecordingFile(path)
    for count in range(LINES):
        # Far longer than a pipe or a page takes at once.
        file.append({"process": number, "count": count, "text": str(number) * 300_000})


def test_lines_of_several_processes_are_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append, args=(str(path), n)) for n in range(PROCESSES)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number in range(PROCESSES):
        own = [line for line in lines if line["process"] == number]
        assert [line["count"] for line in own] == [*range(LINES)]
        assert {len(line["text"]) for line in own} == {300_000}
