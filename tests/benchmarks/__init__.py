"""Tests of the benchmarks that have rules of their own."""
