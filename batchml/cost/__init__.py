"""What runs will cost, cost now, and have cost."""
