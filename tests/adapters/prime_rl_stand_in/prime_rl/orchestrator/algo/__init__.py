"""The table of algorithms, and what makes one."""

ALGORITHM_CLASSES = {}


def build_algorithm(config, policy_pool):
    """The algorithm that a configuration names."""
    return ALGORITHM_CLASSES[config.type](config, policy_pool)
