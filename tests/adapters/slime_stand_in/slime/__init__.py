"""The few names of slime that the adapter calls, for its tests: no package index has slime."""
