"""Conservative policy iteration with resets on exact tabular MDPs (2605.25507): NumPy only, no language model."""
