"""Values of runs: as columns of `ls`, and side by side for `diff` and `compare`."""
