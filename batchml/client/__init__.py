"""What the commands do, for programs: they stand on this, and so can yours."""
