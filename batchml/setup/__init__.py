"""Make AWS match `batchml.toml`: the wanted state, the current state, the plan and its steps."""
