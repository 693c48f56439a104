"""The runner: the parent process of an attempt, which outlives the server.

A runner serves one attempt at a time and is used again. The spec of an attempt comes as a message
over a socket and is never written to disk. With it comes the attempt's record, a file that the
server has locked. The lock stays held while any process has the descriptor, so there is no moment
at which an attempt runs without it. What a runner has done is recorded by files in the attempt's
folder (files.py): the server can be killed and started again at any moment without an effect on the
attempt. The messages only save the server from reading those files.

The server sends an attempt before it has committed that the program may begin. The runner prepares
it (its folder, its environment, its container) and starts the program on a second message. If the
server dies before that, the runner never starts the program and notes this in the record, even if
the journal already has the start. No other file, and no missing file, is evidence of that.

When the socket closes, the server has died: an idle runner ends, a busy one after its attempt.

Standard library only, few imports: a first attempt waits for the runner to start.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import socket
import sys
from typing import Any

from batchml.local.executors.cgroup import Groups, Slot, make_slot, slot_name
from batchml.local.executors.processors import claim_processors
from batchml.local.executors.runner.files import RecordFile, folder_of, now_ms, write_failure
from batchml.local.executors.runner.link import (
    SIGNALS,
    VERSION,
    AttemptIo,
    AttemptKind,
    AttemptWithdrawn,
    ServerLink,
)
from batchml.runtime.processes import (
    become_reaper,
    boot_id,
    kill_descendants,
    reap,
    start_time,
)

_REST_AFTER = 5.0  # seconds without an attempt, after which no process waits for another


class Runner:
    def __init__(
        self,
        link: ServerLink,
        kind: AttemptKind,
        identity: dict[str, Any],
        slot: Slot | None,
        rest_after: float = _REST_AFTER,
    ) -> None:
        self._link = link
        self._kind = kind
        self._identity = identity
        self._encoded = json.dumps(identity).encode()
        self._slot = slot
        self._rest_after = rest_after

    def serve(self) -> None:
        """Run attempts until the server has ended, or a signal requests the end."""
        link = self._link
        link.send({"ready": VERSION}, wait=True)
        while True:
            while link.attempts:
                message, descriptors = link.attempts.pop(0)
                try:
                    self._run_attempt(message, descriptors)
                except BaseException as error:
                    write_failure(message["folder"], error)
                    raise
            if link.server is None or link.terminated:
                return
            if not link.drain(self._rest_after if self._kind.keeps_process else None):
                self._kind.rest()

    def _run_attempt(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if message.get("spec") is None:
            with open(descriptors.pop(), "rb") as file:
                file.seek(0)
                message["spec"] = json.load(file)
        spec = message["spec"]
        folder = folder_of(descriptors[0])
        task_id = spec["task_id"]
        identity = self._encoded
        if "label" in spec:
            identity = json.dumps({**self._identity, "label": spec["label"]}).encode()
        record = RecordFile(folder, descriptors[0], identity)
        if message.get("begin"):
            self._link.begun.add(task_id)
        io = AttemptIo(self._link, folder, task_id, record, message.get("quick", False))
        report: dict[str, Any] = {"task_id": task_id}
        ended: dict[str, Any] = {}
        claims = claim_processors(spec.get("processors", ()))
        try:
            ended = self._kind.run(spec, io)
        except AttemptWithdrawn as error:
            report["withdrawn"] = str(error)
        finally:
            self._kill()
            for claim in claims:
                claim.close()
        ended["log"], reason = io.close()
        if reason:
            ended["reason"] = reason
        # The end is recorded only here, when no process of the attempt runs any more.
        if task_id in self._link.withdrawn:
            report["withdrawn"] = ""
        elif "withdrawn" not in report:
            report["ended"] = {**ended, "stopped_at": now_ms()}
            record.finish(report["ended"])
        elif self._link.server is None:
            self._note_never_began(record)
        to_delete, self._kind.to_delete = self._kind.to_delete, ""
        self._link.forget(task_id)
        record.close()
        self._link.send({**report, "busy": True} if to_delete else report, wait=True)
        if to_delete:
            _remove(to_delete)
            self._link.send({"idle": True}, wait=True)

    def _note_never_began(self, record: RecordFile) -> None:
        """Write this for the next server. Without this note the attempt counts as lost."""
        try:
            record.add({"never_began": True})
        except OSError:
            pass

    def _kill(self) -> None:
        """Kill all remaining processes, as at the end of a container's first process."""
        if not self._kind.keeps_process and not reap():
            if self._slot is not None:
                self._slot.kill()
            kill_descendants()


def _remove(folder: str) -> None:
    from shutil import rmtree

    try:
        rmtree(folder, ignore_errors=True)
    except RecursionError:  # nested a thousand levels deep
        import subprocess

        subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def _slot(groups: Groups, name: str) -> Slot | None:
    if not groups:
        return None
    try:
        return make_slot(groups, name)
    except OSError as error:
        print(f"no limits: {error}", file=sys.stderr)
        return None


def _kind(name: str, slot: Slot | None) -> AttemptKind:
    if name == "container":
        from batchml.local.executors.runner.container import ContainerAttempts

        return ContainerAttempts()
    from batchml.local.executors.runner.process import ProcessAttempts

    return ProcessAttempts(slot)


def _work(config: dict[str, Any]) -> None:
    server = socket.socket(fileno=config["socket"])
    os.set_inheritable(config["socket"], False)
    pid = os.getpid()
    started = start_time(pid)
    slot = None  # the engine limits containers
    if config["kind"] == "process":
        slot = _slot(config["groups"], slot_name(pid, started))
    identity = {
        "boot_id": boot_id(),
        "pid": pid,
        "start_time": started,
        "kind": config["kind"],
        "groups": list(slot.folders.values()) if slot else [],
    }
    kind = _kind(config["kind"], slot)
    try:
        rest_after = config.get("rest_after", _REST_AFTER)
        Runner(ServerLink(server), kind, identity, slot, rest_after).serve()
    finally:
        kind.close()
        kill_descendants()
        if slot is not None:
            slot.remove()


def main() -> None:
    """`main.py CONFIG`: JSON with the kind of attempts, the socket, and the folders for slots.

    A second thread does the work, because the first one represents its process: it is charged for
    memory and chosen when memory is short, and so it must never be in a slot.
    """
    import threading  # noqa: F401  (the thread that imports it first counts as the main thread)

    config = json.loads(sys.argv[1])
    os.umask(0o077)
    os.chdir("/")
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    become_reaper()
    over = _thread.allocate_lock()
    over.acquire()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            _work(config)
        except BaseException as error:
            failed.append(error)
        finally:
            over.release()

    _thread.start_new_thread(work, ())
    over.acquire()
    if failed:
        raise failed[0]


if __name__ == "__main__":
    main()
