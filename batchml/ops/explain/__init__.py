"""Why a run waits or failed: what to ask next, and what the answers come to."""
