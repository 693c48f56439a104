"""What a run measures while it goes on: metrics, use of the machine, spent money, notices."""
