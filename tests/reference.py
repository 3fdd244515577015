"""Slow, obvious versions of the formulas, for comparison with the fast ones."""


def overlong_punishment(length, max_length, buffer):
    """DAPO, 2503.14476 equation 13, as three cases."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return ((max_length - buffer) - length) / buffer
    return -1.0


def group_advantage(reward, group, valid, normalize, unbiased, eps):
    """Group-normalised outcome advantage, one trajectory after the other."""
    out = []
    for i in range(len(reward)):
        peers = [reward[j] for j in range(len(reward)) if group[j] == group[i] and valid[j]]
        if not valid[i]:
            out.append(0.0)
            continue
        mean = sum(peers) / len(peers)
        squares = sum((r - mean) ** 2 for r in peers)
        if normalize == "mean":
            out.append(reward[i] - mean)
        elif normalize == "std_exact":
            std = (squares / len(peers)) ** 0.5
            out.append(0.0 if std < 1e-8 else (reward[i] - mean) / std)
        else:
            std = (squares / max(len(peers) - int(unbiased), 1)) ** 0.5
            out.append((reward[i] - mean) / (std + eps))
    return out


def pass_at_k(num_samples, num_correct, k):
    """Share of all k-subsets of the samples that hold a right one, by listing them."""
    from itertools import combinations

    subsets = list(combinations([i < num_correct for i in range(num_samples)], k))
    return sum(any(s) for s in subsets) / len(subsets)
