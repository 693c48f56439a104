"""Requests, calls and responses of AWS Batch."""
