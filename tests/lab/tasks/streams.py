"""Uniform numbers for tests of task families."""

import random

from creditgraph.pipeline.core.streams import key_of


def uniform(*key):
    return random.Random(key_of("tests", *key)).random
