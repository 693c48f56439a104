"""The supervisor of one node of an MPI run: `python -m batchml.runtime.nodes.mpi.main -- COMMAND`.

The main node runs `mpirun` with the list of all nodes. In place of ssh, mpirun starts `agent.py`,
which asks the supervisor of the named node to run mpirun's daemon; the daemon starts the ranks.
The end of mpirun is the end of the run. docs/multi-node.md describes it for users.

All settings are environment variables that Open MPI, MPICH and Intel MPI read, so a command line
with `mpirun` in it works as well. Sources: Open MPI 4.1, "FAQ: Running MPI jobs"; PRRTE 3,
"MCA parameters" (Open MPI 5); MPICH wiki, "Using the Hydra Process Manager"; Intel MPI Library
Developer Reference, "Hydra Environment Variables". Tried with Open MPI 4.1 and MPICH 4.0.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Dict, List, Optional, Tuple

from batchml.runtime.nodes.link.address import OWN_ADDRESS
from batchml.runtime.nodes.link.connection import Message
from batchml.runtime.nodes.link.remote_start import (
    ControlAddress,
    PreparedTasks,
    RemoteTasks,
    TaskCommand,
)
from batchml.runtime.nodes.mpi.agent import CONTROL, HOSTS
from batchml.runtime.nodes.supervisor.main import ProgramMissing, SupervisorKind, main
from batchml.runtime.nodes.supervisor.ranks import RankContext, RankEnd, RankProcesses
from batchml.runtime.nodes.supervisor.settings import RankLayout, node_environment
from batchml.runtime.nodes.supervisor.spares import RankStart
from batchml.runtime.package import write_program
from batchml.runtime.processes import descendants
from batchml.runtime.protocol.launch import ALL, MPI_LAUNCHERS, RankCommand, with_python
from batchml.runtime.storage.files import write_atomically

_FOLDERS = (  # Amazon Linux, the EFA installer and Intel install mpirun there, not on the PATH
    "/opt/amazon/openmpi/bin", "/usr/lib64/openmpi/bin", "/usr/lib64/mpich/bin",
    "/opt/intel/oneapi/mpi/latest/bin",
)  # fmt: skip
_MISSING = (
    "this image has no {name}: install openmpi-bin or mpich (Debian, Ubuntu), or openmpi (Amazon "
    "Linux, Fedora), in its Dockerfile"
)
_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMIX_RANK=", b"PMI_RANK=")  # one is set in a rank
_WORKING_FOLDER = "BATCHML_MPI_FOLDER"  # the working folder of the command on this node

# The shell script of a rank: it runs the command in the node's working folder, with the variables
# that torchrun would set.
_RANK = f"""
cd "${_WORKING_FOLDER}"
export RANK="${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}"
export WORLD_SIZE="${{OMPI_COMM_WORLD_SIZE:-$PMI_SIZE}}"
export LOCAL_RANK="${{OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}}"
export LOCAL_WORLD_SIZE="${{OMPI_COMM_WORLD_LOCAL_SIZE:-$MPI_LOCALNRANKS}}"
exec "$@"
"""


def read_command(words: Sequence[str], nodes: int, environ: Mapping[str, str]) -> RankCommand:
    """Read the job's command: a program that mpirun is to start, or a command line of mpirun.

    Raises ProgramMissing if the image has no mpirun.
    """
    path = environ.get("PATH")
    if is_launcher(words):
        program = _find_launcher(words[0], path)
        return RankCommand((program, *words[1:]), _processes_per_node(words, nodes))
    _find_launcher("mpirun", path)
    return RankCommand(tuple(with_python(words, lambda name: shutil.which(name, path=path))), 0)


def is_launcher(words: Sequence[str]) -> bool:
    """Whether this is a command line of mpirun."""
    return os.path.basename(words[0]) in MPI_LAUNCHERS


def _find_launcher(name: str, path: Optional[str]) -> str:
    folders = os.pathsep.join((path or os.defpath, *_FOLDERS))
    program = shutil.which(name, path=folders)
    if program is None:
        raise ProgramMissing(_MISSING.format(name=name))
    return program


def _processes_per_node(words: Sequence[str], nodes: int) -> int:
    """The processes of each node that a command line of mpirun requests; 0: it does not say."""
    if not words[1:2] or not words[1].startswith("-"):  # what follows is the program's
        return 0
    for name, value in zip(words, words[1:]):  # noqa: B905, RUF007
        if name in ("-n", "-np", "--np", "-c") and value.isascii() and value.isdigit():
            return -(-int(value) // nodes)
    return 0


def mpirun_line(command: Sequence[str], environ: Mapping[str, str], world: int) -> List[str]:
    """The words of the command that the main node runs."""
    if is_launcher(command):
        return list(command)
    mpirun = _find_launcher("mpirun", environ.get("PATH"))
    return [mpirun, "-n", str(world), "/bin/sh", "-c", _RANK, "rank", *command]


def mpirun_variables(folder: str, interface: str) -> Dict[str, str]:
    """The settings of each implementation of mpirun: the list of nodes, and our agent for ssh.

    `folder` contains the files that `write_files` writes. Processes are not bound to cores, because
    the vCPUs of a container are a share of all cores of its host.
    """
    agent = os.path.join(folder, "agent")
    openmpi, mpich = os.path.join(folder, "hosts.openmpi"), os.path.join(folder, "hosts.mpich")
    found = {
        "OMPI_MCA_plm_rsh_agent": agent,
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "OMPI_MCA_orte_leave_session_attached": "1",
        "OMPI_MCA_orte_default_hostfile": openmpi,
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_plm_ssh_agent": agent,
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "PRTE_MCA_prte_default_hostfile": openmpi,
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": agent,
        "HYDRA_HOST_FILE": mpich,
        "HYDRA_ENV": "none",  # each rank has the environment of its own node
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": agent,
        "I_MPI_HYDRA_BRANCH_COUNT": "0",
        "I_MPI_HYDRA_HOST_FILE": mpich,
    }
    if interface:
        for name in ("OMPI_MCA_oob_tcp_if_include", "OMPI_MCA_btl_tcp_if_include",
                     "PRTE_MCA_prte_if_include", "HYDRA_IFACE", "I_MPI_HYDRA_IFACE"):  # fmt: skip
            found[name] = interface
    return found


def daemon_variables(folder: str) -> Dict[str, str]:
    """Settings of Open MPI's daemon if the nodes are processes of one machine.

    Open MPI names its files by the name of the machine, so each node needs a folder of its own.
    """
    names = ("OMPI_MCA_orte_tmpdir_base", "OMPI_MCA_btl_vader_backing_directory",
             "PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_btl_sm_backing_directory")  # fmt: skip
    return dict.fromkeys(names, folder)


def write_files(folder: str, members: Sequence[Tuple[str, int]]) -> None:
    """Write the lists of nodes and the agent into a folder. Raises OSError.

    Every node needs these files: Open MPI's daemons look for them, although only mpirun uses them.
    """
    files = {
        "hosts.openmpi": "".join(f"{host} slots={count}\n" for host, count in members),
        "hosts.mpich": "".join(f"{host}:{count}\n" for host, count in members),
        HOSTS: json.dumps({host: node for node, (host, _) in enumerate(members)}),
    }
    for name, text in files.items():
        write_atomically(os.path.join(folder, name), text.encode(), 0o644)
    agent = os.path.join(folder, "agent")
    write_program(agent, "batchml.runtime.nodes.mpi.agent", f'"{folder}", words')


class MpiProcesses(RankProcesses):
    """mpirun on the main node, and the daemon of mpirun and its ranks on each node."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context._replace(output="", logs=ALL))
        self._tasks = RemoteTasks(context.selector, context.tell, self._prepare, self.adopt)
        self._token = context.token
        self._environ: Dict[str, str] = {}
        self._is_main = False

    def start(self, command: Sequence[str], environ: Mapping[str, str], layout: RankLayout) -> None:
        """Start mpirun on the main node. Other nodes wait for its order. Raises OSError."""
        self._begin()
        self._is_main = layout.node == 0
        interface = layout.interface if layout.nodes > 1 else ""
        self._environ = {
            **mpirun_variables(self._temporary, interface),
            **node_environment(environ, layout),
            _WORKING_FOLDER: os.getcwd(),
        }
        write_files(self._temporary, layout.members)
        if self._is_main:
            control = ControlAddress(layout.master, layout.control_port, self._token)
            control.write(os.path.join(self._temporary, CONTROL))
            words = mpirun_line(command, environ, layout.world)
            start = RankStart(words, self._environ, errors_apart=False)
            self._start_rank(0, b"", start, layout.generation)

    def hear(self, message: Message) -> None:
        self._tasks.hear(message)

    def tick(self, now: float) -> None:
        self._tasks.tick(now)

    def living(self) -> List[Tuple[int, int]]:
        return []  # no rank can write its stacks: it may be any program, not only Python

    def signal(self, number: int) -> None:
        """Signal the ranks. The daemons get only SIGKILL, and SIGTERM while there are no ranks:
        without daemons mpirun would kill all ranks.
        """
        processes = descendants(os.getpid())
        ranks = [pid for pid in processes if _is_rank(pid)]
        before_ranks = not ranks and number == signal.SIGTERM
        self._signal(processes if before_ranks or number == signal.SIGKILL else ranks, number)

    def reap(self) -> List[RankEnd]:
        """Return mpirun once it has ended, without its last lines, which the log has already."""
        return [end._replace(tail=()) for end in super().reap()]

    def clear(self) -> bool:
        """Kill what is left; except on the main node, only once mpirun's daemon has ended."""
        if not self._is_main and (not self._tasks.is_empty or descendants(os.getpid())):
            return False
        return super().clear()

    def _prepare(self, order: Message) -> PreparedTasks:
        self.last_output = time.monotonic()
        environ = self._environ
        if OWN_ADDRESS in environ:  # all nodes are on one machine
            environ = {**environ, **daemon_variables(self._temporary)}
        line = str(order["line"]).replace(str(order["folder"]), self._temporary)
        command = TaskCommand(["/bin/sh", "-c", line], environ)
        return PreparedTasks([command], returns_output=True, joins_errors=True)


def _is_rank(pid: int) -> bool:
    """Whether a process is a rank, or was started by one."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith(_RANK_VARIABLES) for variable in variables)


if __name__ == "__main__":
    main(SupervisorKind(read_command, MpiProcesses, launcher="mpirun"))
