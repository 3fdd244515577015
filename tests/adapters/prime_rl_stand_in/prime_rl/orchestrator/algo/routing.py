"""Advantages of a trace."""


def assign_advantages(trace, values):
    """Gives each sampled token of the nodes its value, in their order."""
    nodes = [node for node in trace.nodes if any(node.mask)]
    if len(values) != sum(sum(node.mask) for node in nodes):
        raise ValueError("one value per sampled token")
    rest = list(values)
    for node in nodes:
        node.advantages, rest = rest[: sum(node.mask)], rest[sum(node.mask) :]
