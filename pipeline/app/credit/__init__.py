"""Credit of several methods for the same tokens, beside the truth."""
