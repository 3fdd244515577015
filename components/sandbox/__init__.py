"""Runs generated programs in isolation: bubblewrap namespaces, a system-call filter and hard limits."""
