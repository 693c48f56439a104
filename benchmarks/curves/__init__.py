"""Curves: what a unit costs at 100, 1,000, 10,000 and 100,000 of it.

The sizes are reached by writing the server's tables, its state or a ledger with the product's own
functions, so that each curve takes seconds. Costs are processor time wherever the work is done in
one process: other programs of the machine disturb it least.
"""
