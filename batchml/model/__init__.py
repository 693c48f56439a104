"""The nouns that several packages share, such as a job, a run and an environment. No I/O."""
