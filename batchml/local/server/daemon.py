"""The server's process: `python -m batchml.local.server.daemon`.

It locks the state folder, opens the journal, adopts the attempts of earlier servers, binds a
loopback port, and serves until a signal stops it or it has been idle for long. For the process that
started it, it writes its endpoint, or the error that prevents the start, to `--ready-fd`.

For a copy of a state folder it only serves reads. It stops when its folder is moved or deleted.
When its installation was upgraded, it restarts with the new version. Jobs continue meanwhile.
"""

import argparse
import asyncio
import errno
import gc
import json
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from batchml.clock import Clock, SystemClock
from batchml.errors import (
    BatchmlError,
    DiskFull,
    LocalServerError,
    StateDamaged,
    StateFolderGone,
)
from batchml.local.batch import engine, faults
from batchml.local.batch.core import Core
from batchml.local.batch.events import (
    AttemptEnded,
    AttemptNeverBegan,
    CallReceived,
    ClockTicked,
    Event,
)
from batchml.local.batch.fault_injection import Chaos, parse
from batchml.local.batch.state import BatchState
from batchml.local.executors.choice import EXECUTORS, choose
from batchml.local.executors.container_spec import spec_maker
from batchml.local.executors.network import AUTO, LOOPBACK, NAMESPACES, NodeNetwork
from batchml.local.executors.processors import MachineProcessors, find_processors
from batchml.local.executors.spec import ExecutorHost, SpecPrefetch
from batchml.local.executors.supervisor import AttemptSupervisor
from batchml.local.executors.sweeper import remove_unowned
from batchml.local.home import Home, ServerEndpoint
from batchml.local.images import publish_runtime
from batchml.local.logs.api import LogReads
from batchml.local.logs.check import restore_short
from batchml.local.logs.files import StreamIndex
from batchml.local.machine import read_machine
from batchml.local.server import auth
from batchml.local.server.app import BatchServer, ConnectionGate, ConnectionLimits, wait_until_idle
from batchml.local.server.protocol import MAX_HEADERS, ApiError
from batchml.local.store import identity
from batchml.local.store.identity import FolderIdentity
from batchml.local.store.journal import Journal

IDLE_LIMIT = 600.0  # seconds without an unfinished job or a request
EXIT_CRASHED = 74
RESTART = -1  # not an exit code: the process executes the new version
MACHINE = "this-machine"  # the environment that the first start creates

log = logging.getLogger("batchml.local")


def main() -> int:
    parser = argparse.ArgumentParser(prog="batchml.local.server.daemon")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--idle", type=float, default=IDLE_LIMIT)
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--chaos")
    parser.add_argument("--executor", choices=EXECUTORS)
    parser.add_argument("--allow-path", action="append")
    parser.add_argument("--allow-privileged", action=argparse.BooleanOptionalAction)
    parser.add_argument("--vcpus", type=int)
    options = parser.parse_args()
    os.umask(0o077)
    _raise_limits()
    home = Home(options.home)
    try:
        home.prepare()
        logging.basicConfig(
            filename=home.log, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
        )
        code = asyncio.run(serve(home, options))
    except Exception as error:
        reported = _to_batchml_error(error, home)
        log.error("%s", reported, exc_info=None if reported is error else error)
        _send_ready(options.ready_fd, {"error": str(reported), "kind": type(reported).__name__})
        code = EXIT_CRASHED if isinstance(error, OSError) else reported.exit_code
    if code == RESTART:
        words = iter(sys.orig_argv[1:])  # all but `--ready-fd` and its value are kept
        again = [word for word in words if word != "--ready-fd" or not next(words)]
        os.execv(sys.executable, [sys.executable, *again])
    return code


def _to_batchml_error(error: Exception, home: Home) -> BatchmlError:
    if isinstance(error, BatchmlError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"The server cannot start: no space left on the disk of {home.root}.")
    if isinstance(error, ApiError):
        return LocalServerError(f"The server cannot start: {error.message}")
    return LocalServerError(f"The server cannot start: {error}. Its log: {home.log}")


def _raise_limits() -> None:
    """Raise the limit of open files, because connections and attempts take one each, and the limit
    of file sizes, because logs and the journal grow.
    """
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        _, most = resource.getrlimit(limit)
        resource.setrlimit(limit, (most, most))


async def serve(home: Home, options: argparse.Namespace) -> int:
    """Serve until stopped. Raises LocalServerError when the server cannot start."""
    clock = SystemClock()
    loop = asyncio.get_running_loop()
    stop_event = asyncio.Event()  # registered first: no signal interrupts the start
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_event.set)
    lock = home.hold()
    check_not_emptied(home)
    why_read_only = partial(identity.why_read_only, home)
    journal = Journal(home.journal, may_be_new=not has_served(home), why_read_only=why_read_only)
    if journal.read_only:
        return await _serve_a_copy(home, journal, options, stop_event)
    choice = choose(
        home, options.executor, options.allow_path, options.allow_privileged, options.vcpus
    )
    keys = home.keys()
    own = claim(home, journal)
    guard = home.guard()
    machine = read_machine()
    if choice.vcpus:
        machine = replace(machine, vcpus=choice.vcpus)
    chaos = _read_chaos(options.chaos)
    now = int(clock.now() * 1000)
    # Nothing of it is garbage, and searching it while it grows takes most of the time.
    gc.disable()
    state = engine.restore(faults.enable(journal.load(machine), chaos, now), now)
    gc.freeze()
    gc.enable()
    core = Core(state, journal, clock, guard)
    listener = bind(home, options.port)
    endpoint = ServerEndpoint(os.getpid(), listener.getsockname()[1], str(chaos or ""))
    auth.drop_own_credentials(os.environ)
    host = ExecutorHost(
        home, publish_runtime(home.runtimes), dict(os.environ), has_gpus=bool(machine.gpus),
        endpoint=endpoint.url, keys=keys, identity=own.id,
    )  # fmt: skip
    network = NodeNetwork(own.id, home.network, node_network(), endpoint.port)

    make_spec = spec_maker(host, choice.permits)

    def report(event: Event) -> None:
        if isinstance(event, (AttemptEnded, AttemptNeverBegan)):
            network.release(event.task_id)
        core.report(event)

    upgraded = asyncio.Event()

    def restart() -> None:
        upgraded.set()
        stop_event.set()

    prefetch = SpecPrefetch(home.root, make_spec, network)
    executor = AttemptSupervisor(
        home, own, host.environ, loop, clock, report, make_spec, choice.kind, prefetch, restart,
        processors=MachineProcessors(find_processors()),
    )  # fmt: skip
    core.executor = executor
    # Before the core starts attempts of its own, which need no adoption.
    await network.restore(state.by_task)
    adopt_all(state, executor)
    logs = LogReads(journal, lambda task_id: home.attempt(task_id) / "log", clock)
    server = BatchServer(
        core, journal, logs, keys, endpoint.port, clock, lambda: executor.held_back
    )
    loop_task = loop.create_task(core.run())
    await create_defaults(core, clock)
    if options.vcpus is not None:
        await _resize_environment(core, clock)
    core.report(ClockTicked(int(clock.now() * 1000)))  # waiting jobs may fit now
    home.write_endpoint(endpoint)
    _send_ready(options.ready_fd, msgspec.to_builtins(endpoint))
    log.info("serving on %s, pid %d", endpoint.url, endpoint.pid)
    if endpoint.chaos:
        log.info("chaos: %s", endpoint.chaos)

    def poll() -> None:
        guard()
        for job in core.state.jobs_with_attempt():
            if job.attempt is not None and job.attempt.started_at is None:
                executor.check_progress(job.attempt.task_id)

    removing = None
    if choice.had_docker:
        removing = loop.create_task(remove_unowned(home, own.id, lambda: core.state.by_task))
    idle_task = loop.create_task(wait_until_idle(server, core, clock, options.idle, poll))
    try:
        code = await _until_over(server, listener, loop_task, idle_task, stop_event)
        return RESTART if code == 0 and upgraded.is_set() else code
    finally:
        idle_task.cancel()
        if removing is not None:
            removing.cancel()
        core.close()
        await asyncio.wait({loop_task})
        executor.close()
        network.close()
        logs.close()
        _close(journal, guard)
        os.close(lock)


def _close(journal: Journal, guard: Callable[[], None]) -> None:
    try:
        guard()
    except StateFolderGone:
        # SQLite deletes its write-ahead log by name as it closes, and the name may be another
        # journal's.
        logging.shutdown()
        os._exit(EXIT_CRASHED)
    journal.close()


def claim(home: Home, journal: Journal) -> FolderIdentity:
    """Return the identity of this folder, after recording it in the journal and in its identity
    file. In a copy, and after the machine has started again, logs are restored before that.
    """
    kept = journal.identity()
    now = identity.observe(home, kept.id if kept is not None else "")
    if kept is not None and (kept.boot != now.boot or kept.adopted_from):
        _restore_logs(home, journal)
    if now != kept:
        journal.set_identity(now)
    identity.write_identity(home, now)
    return replace(now, adopted_from=kept.adopted_from if kept is not None else "")


def _restore_logs(home: Home, journal: Journal) -> None:
    """Write short logs again that a power cut has taken. Nothing is synced: each start of the
    machine does this.
    """
    streams = StreamIndex(journal.path)
    try:
        for task_id, proof in streams.short_logs():
            restore_short(str(home.attempt(task_id) / "log"), proof)
    finally:
        streams.close()


async def _serve_a_copy(
    home: Home, journal: Journal, options: argparse.Namespace, stop_event: asyncio.Event
) -> int:
    """Serve only reads, for a folder that is not its journal's."""
    clock = SystemClock()
    loop = asyncio.get_running_loop()
    why = (
        f"The state folder {home.root} {journal.read_only}. It is read-only: its runs can be "
        f"shown, but nothing in it is started or changed. To run jobs in it: {identity.ADOPT}"
    )
    core = Core(engine.restore(journal.load(read_machine())), journal, clock, read_only=why)
    listener = bind(home, options.port)
    endpoint = ServerEndpoint(os.getpid(), listener.getsockname()[1], read_only=why)
    logs = LogReads(journal, lambda task_id: home.attempt(task_id) / "log", clock)
    server = BatchServer(core, journal, logs, home.keys(), endpoint.port, clock)
    home.write_endpoint(endpoint)
    _send_ready(options.ready_fd, msgspec.to_builtins(endpoint))
    log.warning("serving on %s, pid %d, for reading only: %s", endpoint.url, endpoint.pid, why)
    idle_task = loop.create_task(wait_until_idle(server, core, clock, options.idle, lambda: None))
    never = loop.create_task(asyncio.Event().wait())
    try:
        return await _until_over(server, listener, never, idle_task, stop_event)
    finally:
        idle_task.cancel()
        never.cancel()
        logs.close()
        journal.close()


async def _until_over(
    server: BatchServer,
    listener: socket.socket,
    core: asyncio.Task[Any],
    idle: asyncio.Task[Any],
    stop_event: asyncio.Event,
) -> int:
    """Serve until a signal, idleness, or a failure of the core, which ends the server."""
    import uvicorn

    config = uvicorn.Config(
        server, log_config=None, log_level="error", access_log=False, lifespan="off", ws="none",
        http=cast(Any, ConnectionGate(ConnectionLimits()).protocol), loop="asyncio",
        server_header=False, backlog=256,
        h11_max_incomplete_event_size=MAX_HEADERS, timeout_graceful_shutdown=5,
    )  # fmt: skip
    http = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    serving = loop.create_task(http.serve(sockets=[listener]))
    stopping = loop.create_task(stop_event.wait())
    await asyncio.wait({serving, core, idle, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    http.should_exit = True
    await serving
    for task, name in ((core, "core"), (idle, "idle watch")):
        if task.done() and task.exception() is not None:
            error = task.exception()
            text = "the %s failed; the next start goes on from the journal: %s"
            known = isinstance(error, LocalServerError)
            log.error(text, name, error, exc_info=None if known else error)
            return EXIT_CRASHED
    log.info("stopped: %s", "idle" if idle.done() else "by a signal")
    return 0


def _read_chaos(text: str | None) -> Chaos | None:
    """The faults to inject, with a seed so that they can be repeated. Raises UsageError."""
    if text is None:
        return None
    chaos = parse(text)
    return replace(chaos, seed=secrets.randbelow(1_000_000)) if chaos.seed is None else chaos


def node_network() -> str:
    """The kind of network for the nodes of multi-node jobs. Raises LocalServerError."""
    chosen = os.environ.get("BATCHML_NODE_NETWORK") or AUTO
    if chosen not in (AUTO, NAMESPACES, LOOPBACK):
        raise LocalServerError(
            f"BATCHML_NODE_NETWORK is {chosen!r}: use {NAMESPACES}, {LOOPBACK} or {AUTO}."
        )
    return chosen


def check_not_emptied(home: Home) -> None:
    """Refuse a missing or empty journal where a server has served before: a new journal would hide
    the loss.
    """
    if has_served(home) and not (home.journal.exists() and home.journal.stat().st_size):
        raise StateDamaged(
            f"The journal {home.journal} is gone or empty, though a server has served from here. "
            f"Nothing was changed. Put back a copy, or run `batchml local reset` to start afresh."
        )


def has_served(home: Home) -> bool:
    return (home.local / "endpoint.json").exists()


def bind(home: Home, port: int) -> socket.socket:
    """A listening loopback socket: on `port`, else on the last server's port, else on any."""
    last = home.endpoint()
    candidates = [port] if port else [last.port, 0] if last else [0]
    for candidate in candidates:
        # asyncio disables Nagle's algorithm only for sockets that name their protocol. With it,
        # each answer takes 40 ms, because head and body are written separately.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", candidate))
            listener.listen(128)
        except (OSError, OverflowError) as error:
            listener.close()
            if candidate == candidates[-1]:
                reason = error.strerror if isinstance(error, OSError) else "there is no such port"
                raise LocalServerError(
                    f"Port {candidate} cannot be used: {reason}. "
                    f"Choose another with --port, or leave it out for any free one."
                ) from error
            continue
        return listener
    raise AssertionError("unreachable: the last candidate returns or raises")


async def _resize_environment(core: Core, clock: SystemClock) -> None:
    """Set the first start's environment to the vCPUs that the machine has from now on."""
    environment = core.state.environments.get(MACHINE)
    vcpus = core.state.machine.vcpus
    if environment is None:
        return
    params = {"computeEnvironment": MACHINE, "computeResources": {"maxvCpus": vcpus}}
    now = int(clock.now() * 1000)
    new_id = f"resized-{now}"
    await core.request(CallReceived("UpdateComputeEnvironment", params, now, new_id))


async def create_defaults(core: Core, clock: Clock) -> None:
    """Give an empty state one compute environment, which covers the whole machine, and the queue
    `default`.
    """
    if core.state.environments or core.state.queues:
        return
    now = int(clock.now() * 1000)
    environment = {
        "computeEnvironmentName": MACHINE,
        "type": "MANAGED",
        "computeResources": {
            "type": "EC2",
            "minvCpus": 0,
            "maxvCpus": core.state.machine.vcpus,
            "subnets": [],
            "instanceTypes": ["optimal"],
            "instanceRole": "ecsInstanceRole",
        },
    }
    order = [{"order": 1, "computeEnvironment": MACHINE}]
    queue = {"jobQueueName": "default", "priority": 10, "computeEnvironmentOrder": order}
    for operation, params in (
        ("CreateComputeEnvironment", environment),
        ("CreateJobQueue", queue),
    ):
        await core.request(CallReceived(operation, params, now, f"first-{operation}"))


def adopt_all(state: BatchState, executor: AttemptSupervisor) -> None:
    for job in state.jobs_with_attempt():
        if job.attempt is not None and not job.is_multinode:
            executor.adopt(job, job.attempt)
    for task_id in engine.tasks_to_stop(state):
        executor.stop(task_id)
    for loss in faults.pending_losses(state):
        executor.lose(loss.task_id, loss.fault, warned=loss.warned)


def _send_ready(ready_fd: int, message: dict[str, Any]) -> None:
    if ready_fd >= 0:
        try:
            os.write(ready_fd, json.dumps(message).encode() + b"\n")
            os.close(ready_fd)
        except OSError:
            pass  # the process that started this one has ended


if __name__ == "__main__":
    sys.exit(main())
