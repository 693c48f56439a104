"""Programs of a cluster that scripts call inside a run: `srun`, `scontrol show`, `module`, `conda`,
and `hostname`, which knows this node's address in the network of the run.

What else there is of Slurm belongs outside.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

_ALWAYS = (
    "srun", "scontrol", "module", "ml", "sbatch", "squeue", "scancel", "sacct", "sinfo", "hostname",
)  # fmt: skip
_UNLESS_THERE = ("conda", "mamba", "micromamba")  # an image may have them
# A script may have a PYTHONPATH and an environment of its own; its tools do without.
_TOOL = """#!/bin/sh
exec "{python}" -I -c 'import sys
sys.path.insert(0, "{root}")
from batchml.runtime.slurm_tools import main
sys.exit(main(sys.argv[1:]))' {name} "$@"
"""
_IN_IMAGE = "nothing is done, an image has its packages"


def scontrol(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """`show hostnames [LIST]`: one a line; `show job`: the little that is known inside."""
    if list(words[:1]) == ["show"] and words[1:2] in (["hostnames"], ["hostname"]):
        from batchml.runtime.slurm_srun import node_names

        names = words[2].split(",") if words[2:] and words[2] else node_names(environ)
        print("\n".join(names), flush=True)
        return 0
    if list(words[:2]) == ["show", "job"]:
        shown = {"JobId": "JOB_ID", "JobName": "JOB_NAME", "NumNodes": "JOB_NUM_NODES",
                 "NodeList": "JOB_NODELIST", "WorkDir": "SUBMIT_DIR"}  # fmt: skip
        found = [f"{name}={environ.get(f'SLURM_{ours}', '')}" for name, ours in shown.items()]
        print(" ".join(found), flush=True)
        return 0
    return elsewhere("scontrol")


def conda(name: str, words: Sequence[str]) -> int:
    """Where an image has none: what would make an environment active does nothing."""
    if words[:1] and words[0] in ("activate", "deactivate", "shell.bash", "shell", "init", "info"):
        print(f"{name}: batchml: {_IN_IMAGE}", file=sys.stderr)
        return 0
    print(f"{name}: batchml: this image has no {name}", file=sys.stderr)
    return 127


def hostname(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """This node's address for -i and -I; all else by the program of the image, if it has one."""
    address = environ.get("SLURMD_NODENAME", "")
    if address and list(words) in (["-i"], ["-I"], ["--ip-address"], ["--all-ip-addresses"]):
        print(address, flush=True)
        return 0
    own = os.path.realpath(environ.get("BATCHML_SLURM_FOLDER", ""))
    folders = [each for each in environ.get("PATH", "").split(os.pathsep) if each]
    others = os.pathsep.join(each for each in folders if os.path.realpath(each) != own)
    program = shutil.which("hostname", path=others)
    if program is not None:
        os.execv(program, ["hostname", *words])
    print(os.uname().nodename, flush=True)
    return 0


def elsewhere(name: str) -> int:
    ours = {"sbatch": "submit", "squeue": "ls", "scancel": "cancel", "sacct": "show"}
    hint = f": batchml {ours[name]}, outside of the run, does such things" if name in ours else ""
    print(f"{name}: batchml: there is no Slurm in a run{hint}", file=sys.stderr, flush=True)
    return 127


def put_tools(folder: str) -> str:
    """Programs of these names in a folder, which is returned."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for name in (*_ALWAYS, *(each for each in _UNLESS_THERE if shutil.which(each) is None)):
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(_TOOL.format(python=sys.executable, root=root, name=name))
        os.chmod(path, 0o755)
    return folder


def main(words: Sequence[str]) -> int:
    name, rest = words[0], words[1:]
    if name == "srun":
        from batchml.runtime.slurm_srun import srun

        try:
            return srun(rest, os.environ)
        except OSError as error:
            print(f"srun: {error}", file=sys.stderr, flush=True)
            return 127
    if name == "scontrol":
        return scontrol(rest, os.environ)
    if name == "hostname":
        return hostname(rest, os.environ)
    if name in ("module", "ml"):
        print(f"{name}: batchml: {_IN_IMAGE}", file=sys.stderr)
        return 0
    return conda(name, rest) if name in _UNLESS_THERE else elsewhere(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
