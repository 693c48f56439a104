"""Prove an environment: `batchml prove`, its recordings, and what these say of our beliefs."""
