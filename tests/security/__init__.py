"""Our own security rules, T1 to T17, and the scanners: over templates and requests."""
