"""Runs of several groups of nodes: one head and its workers, each a job of AWS Batch."""
