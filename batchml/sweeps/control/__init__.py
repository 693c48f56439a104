"""The controller of a sweep: its ledger, lease, decisions, limits, and observations of jobs."""
