"""Calls of AWS, with types of batchml. No other package reads AWS's JSON."""
