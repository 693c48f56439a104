"""Prove an environment: `batchml prove`, its recordings, and their comparison with our beliefs."""
