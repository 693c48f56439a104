"""Hyper-parameter search: the sweep file, samplers, the controller, the report."""
