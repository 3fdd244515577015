"""The files that `creditgraph new` writes: a method, an environment, a verifier, each with a recipe and its tests."""
