"""`make bench`: every benchmark, one after the other."""

from benchmarks import startup

print("# Starting a command (medians; ratios pair by pair)")
startup.main()
