"""Exit codes that the runtime chooses, and no program: docs/multi-node.md, "Exit codes"."""

from __future__ import annotations

TRY_ELSEWHERE = 75  # host unfit, peer lost or hung, spot notice, store away: another host may do
CRASH_LOOP = 76  # three generations without a new checkpoint: more tries would end the same way
DUPLICATE = 77  # another job has this run's claim
CONFIGURATION_ERROR = 78  # something that no other host would do better
LOG_TOO_LARGE = "LogTooLarge"  # begins the reason of an attempt whose log could grow no more
STOPPED = 143  # as after any SIGTERM

CRASH_LOOP_STARTS = 3  # generations in a row without a new checkpoint
