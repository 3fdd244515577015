"""Slow, obvious versions of the formulas, for comparison with the fast ones."""
