"""The embedded AWS Batch: a local server that answers AWS Batch requests and runs the jobs on this
machine.
"""
