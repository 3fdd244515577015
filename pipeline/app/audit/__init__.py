"""Audit of credit: checks of any function that turns rewards into advantages, or log-probs into a loss."""
