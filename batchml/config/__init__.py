"""Read batchml.toml and the settings of a command, with every mistake reported at once."""
