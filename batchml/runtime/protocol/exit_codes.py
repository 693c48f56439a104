"""Exit codes of the runtime, not of programs: docs/multi-node.md, "Exit codes"."""

from __future__ import annotations

TRY_ELSEWHERE = 75  # unfit host, lost or hung node, spot notice, no store: try another host
CRASH_LOOP = 76  # three generations without a new checkpoint: more tries would end the same way
DUPLICATE = 77  # another job has claimed this run
CONFIGURATION_ERROR = 78  # an error that would also happen on other hosts
LOG_TOO_LARGE = "LogTooLarge"  # begins the reason of an attempt whose log reached its size limit
IDLE = 79  # the run was idle for as long as idle_after allows
IDLE_END = "idle for"  # begins the runtime's line about that end
STOPPED = 143  # a stop was requested: 128 + SIGTERM, as a shell reports it

CRASH_LOOP_STARTS = 3  # generations in a row without a new checkpoint
