"""Every check that needs a GPU, in one command of at most eight minutes: `make gpu`.

`python -m benchmarks.gpu --help` has the options. `checks` has the table of the checks and says how
to add one. Nothing else depends on the figures. The newest of each kind of GPU are in `results/`.

A check runs with any Python from 3.10 on that has PyTorch. So these modules, and what they import
of batchml, need nothing but the standard library and, in a check, PyTorch.
"""
