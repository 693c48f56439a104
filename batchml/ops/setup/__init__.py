"""`batchml.toml` -> AWS: what is wanted, what is there, the plan between them, and its steps."""
