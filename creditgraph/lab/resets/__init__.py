"""Whether resets will pay for a policy on its problems, before any training."""
