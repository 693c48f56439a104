"""`batchml dashboard --export`: the pages as files that need no server."""
