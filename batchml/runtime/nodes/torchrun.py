"""The launch kind `torchrun`: one process for each rank, with the variables that `torchrun` sets.

`python -m batchml.runtime.nodes.torchrun -- COMMAND ...` supervises the ranks of one node.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from batchml.runtime.nodes.supervisor.main import SupervisorKind, main
from batchml.runtime.nodes.supervisor.ranks import RankProcesses
from batchml.runtime.protocol.launch import RankCommand, rank_command


def _read_command(words: Sequence[str], nodes: int, environ: Mapping[str, str]) -> RankCommand:
    return rank_command(words, nodes, lambda name: shutil.which(name, path=environ.get("PATH")))


if __name__ == "__main__":
    main(SupervisorKind(_read_command, RankProcesses))
