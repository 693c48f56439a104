"""Calls of AWS Batch: our types in, our types out."""
