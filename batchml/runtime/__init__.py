"""Inside the container: standard library only, Python 3.8 and later."""
