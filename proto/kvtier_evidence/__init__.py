"""What both ends of the wire compute alike: counts, windows, assignment, e-values and verdicts."""
