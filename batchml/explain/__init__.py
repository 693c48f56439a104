"""Why a run waits or failed: the next question to AWS, and the causes that the answers show."""
