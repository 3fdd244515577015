"""Slow, obvious versions of the formulas of trees; `reference.py` has the others."""

import math


def entropy_cuts(entropies, segments, quantile):
    """Entropy cuts with a quantile, by sorting tokens; one response."""
    places = sorted(range(1, len(entropies)), key=lambda t: (-entropies[t], t))
    places = places[: math.ceil((1 - quantile) * len(entropies))]
    return sorted(places[: segments - 1]) + ([len(entropies)] if entropies else [])


def token_owner(row, token, parent, inherited):
    """Row that sampled a token of a row, by following the lineage."""
    while parent[row] >= 0 and token < inherited[row]:
        row = parent[row]
    return row


def tree_credit(parent, inherited, length, reward, valid, method, value="leaves"):
    """Advantage of every token of one tree, token by token: a node is the set of leaves that share a token.

    Lists of lists; None where the token's leaves have no valid reward.
    """
    rows = range(len(length))

    def sharing(row, token):
        return [
            i
            for i in rows
            if token < length[i]
            and token_owner(i, token, parent, inherited) == token_owner(row, token, parent, inherited)
        ]

    def mean(leaves):
        known = [reward[i] for i in leaves if valid[i]]
        return sum(known) / len(known) if known else None

    def children(leaves, depth):
        """Families of the leaves that go on beyond `depth` tokens, and the leaves that end there."""
        families = []
        for i in leaves:
            family = sharing(i, depth) if depth < length[i] else [i]
            if family not in families:
                families.append(family)
        return families

    def span(leaves, depth):
        """First depth at which the leaves of a node part."""
        if len(leaves) == 1:
            return length[leaves[0]]
        while all(depth < length[i] for i in leaves) and sharing(leaves[0], depth) == leaves:
            depth += 1
        return depth

    def worth(leaves, depth):
        """V of the node that holds `leaves` and parts at `depth`, by slow recursion."""
        if value == "leaves" or len(leaves) == 1:
            return mean(leaves)
        parts = [worth(family, span(family, depth)) for family in children(leaves, depth)]
        parts = [part for part in parts if part is not None]
        return sum(parts) / len(parts) if parts else None

    out = []
    for row in rows:
        line, depth, over = [], 0, list(rows)
        while depth < length[row]:
            family = sharing(row, depth)
            end = span(family, depth)
            own, above = worth(family, end), worth(over, depth)
            siblings = [worth(other, span(other, depth)) for other in children(over, depth)]
            siblings = [v for v in siblings if v is not None]
            if own is None:
                credit = None
            elif method == "siblings":
                credit = own - sum(siblings) / len(siblings)
            else:
                credit = (2 * own - worth(list(rows), 0) - above) / sum(valid[i] for i in family) ** 0.5
            line += [credit] * (end - depth)
            depth, over = end, family
        out.append(line)
    return out
