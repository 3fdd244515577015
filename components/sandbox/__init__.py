"""Running generated programs where they can do no harm: bubblewrap namespaces, a system-call filter and hard limits."""
