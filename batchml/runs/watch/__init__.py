"""Follow runs to their end, with their output.

`wait.follow` yields the events of one run, its children and nodes; `wait.wait_for_runs` waits for
many runs, with one call for each hundred; `logs.read_output` reads the output so far. The caller
decides what to show.
"""
