"""The few names of prime-rl that the adapter extends, for its tests: no package index has prime-rl."""
