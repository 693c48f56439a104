"""Follow runs to their end: one poller for all of them, and logs that lose no line.

`follow.follow` yields what happens to one run, its children and nodes, as values (`events`);
`poller.wait` waits for many runs with one call for each hundred of them; `logs.printed` reads what
there is. The caller decides what to show.
"""
