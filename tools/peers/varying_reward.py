"""A reward that differs between responses and depends on nothing else, for measuring models that solve nothing.

Without it every reward of a random model is 0, no group has a signal, and learning is skipped on one side.
"""

import zlib


def varies(prompt: str, response: str, answer: str) -> float:
    """A number in [0, 1) from the response's text, the same in every process."""
    return zlib.crc32(response.strip().encode()) / 2**32
