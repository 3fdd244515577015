"""Slow, obvious versions of the formulas, for comparison with the fast ones."""

import math
from itertools import combinations

import torch
from reference_trees import entropy_cuts, token_owner, tree_credit  # noqa: F401  # part of the fixture `reference`


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
        elif normalize == "over_mean":
            out.append(0.0 if mean < 1e-8 else (reward[i] - mean) / mean)
        elif normalize == "std_exact":
            std = (squares / len(peers)) ** 0.5
            out.append(0.0 if std < 1e-8 else (reward[i] - mean) / std)
        else:
            std = (squares / max(len(peers) - int(unbiased), 1)) ** 0.5
            out.append((reward[i] - mean) / (std + eps))
    return out


def pass_at_k(num_samples, num_correct, k):
    """Share of all k-subsets of the samples that hold a right one, by listing them."""
    subsets = list(combinations([i < num_correct for i in range(num_samples)], k))
    return sum(any(s) for s in subsets) / len(subsets)


# --- learner ---


def plain_logprobs(hidden, weight, targets, temperature=1.0, bias=None, softcap=0.0, scale=1.0):
    """Log-probs and entropies of targets by one whole softmax."""
    logits = hidden @ weight.T * scale if bias is None else (hidden @ weight.T + bias) * scale
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    table = (logits.float() / temperature).log_softmax(-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


def separate_logprobs(model, prompts, responses, temperature=1.0):
    """Log-probs and entropies of each response token, one sequence at a time; lists of tensors."""
    logprobs, entropies = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([prompt + response], device=model.device)).logits[0].float() / temperature
        table = logits.log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(response) - 1)
        logprobs.append(torch.stack([table[p, t] for p, t in zip(places, response, strict=True)]))
        entropies.append(torch.stack([-(table[p].exp() * table[p]).sum() for p in places]))
    return logprobs, entropies


def aggregate_loss(rows, masks, how, constant_length=0):
    """Loss over rows of per-token terms, by plain sums."""
    trained = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(rows, masks, strict=True)]
    count = len(trained)
    if how == "token_mean":
        return sum(x for row in trained for x in row) / sum(len(row) for row in trained)
    if how == "seq_mean_token_mean":
        return sum(sum(row) / len(row) for row in trained if row) / count
    if how == "seq_mean_token_sum":
        return sum(x for row in trained for x in row) / count
    return sum(x for row in trained for x in row) / (count * constant_length)


def token_loss(logprobs, old, advantage, clip_low, clip_high, dual_clip=0.0):
    """PPO's clipped token loss of one trajectory, token by token."""
    out = []
    for new, before, a in zip(logprobs, old, advantage, strict=True):
        ratio = (new - before).exp()
        objective = min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a)
        if dual_clip and a < 0:
            objective = max(objective, dual_clip * a)
        out.append(-objective)
    return out


def gae(values, reward, lam, gamma=1.0):
    """Generalised advantage estimation over segments, as the double sum of its definition; one trajectory."""
    count = len(values) - 1
    delta = [(reward if k == count - 1 else gamma * values[k + 1]) - values[k] for k in range(count)]
    return [sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, count)) for k in range(count)]


def redistribution(values, reward, sizes, sign, form):
    """Segment rewards and credit shares of one trajectory with at least one segment."""
    gains = [values[k + 1] - values[k] for k in range(len(sizes))]
    rest = reward - sum(gains)
    parts = [g + rest / len(gains) for g in gains]
    uniform = [n / max(sum(sizes), 1) for n in sizes]
    largest = max(abs(g) for g, n in zip(gains, sizes, strict=True) if n)
    gains = [sign * g / largest for g in gains]
    if form.head == "softmax":
        raw = [math.exp(g / form.temperature) if n else 0.0 for g, n in zip(gains, sizes, strict=True)]
    elif form.head == "signed":
        raw = [g if n else 0.0 for g, n in zip(gains, sizes, strict=True)]
    else:
        raw = [max(g, 0.0) if n else 0.0 for g, n in zip(gains, sizes, strict=True)]
    if form.per == "token":
        raw = [w * n for w, n in zip(raw, sizes, strict=True)]
    no_return = form.head == "signed" and abs(sum(parts)) < 1e-6
    shares = uniform if no_return or sum(raw) < 1e-6 else [w / sum(raw) for w in raw]
    if form.head == "clip_floor":
        shares = [(1 - form.floor) * s + form.floor * u for s, u in zip(shares, uniform, strict=True)]
    # The largest part of the way from uniform to these shares, on a grid, at which every factor is within the bound.
    for tenth_percent in range(1000, -1, -1):
        part = tenth_percent / 1000
        drawn = [u + part * (s - u) for s, u in zip(shares, uniform, strict=True)]
        if all(abs(d) <= form.max_factor * u + 1e-9 for d, u in zip(drawn, uniform, strict=True)):
            return parts, drawn, part
    raise AssertionError("uniform shares are within every bound")


def entropy_ends(entropies, segments):
    """Cuts before the segments − 1 most uncertain tokens other than the first; one response."""
    chosen = sorted(range(1, len(entropies)), key=lambda t: (-entropies[t], t))[: segments - 1]
    return sorted(chosen) + ([len(entropies)] if len(entropies) else [])


def merge_lowest(ends, entropies, segments):
    """Keyword segments merged pair by pair, recomputing every sum each time; one response."""
    ends = list(ends)
    while len(ends) > segments:
        starts = [0, *ends[:-1]]
        sums = [sum(entropies[starts[k] : ends[k + 1]]) for k in range(len(ends) - 1)]
        del ends[sums.index(min(sums))]
    return ends


def trace_weight(t, k, decay, style="recent"):
    """w(t, k) of an eligibility trace; t and k count from 1."""
    if k > t:
        return 0.0
    recent = decay ** (t - k)
    return max(recent, decay ** (k - 1)) if style == "both" else recent


def trace_loss(
    logprobs, old, advantage, mask, high, clip_low, clip_high, decay, style, clip, max_weight=2.0
):  # fmt: skip
    """Per-token trace loss of one trajectory by double loops; `high` marks tokens in the history. Zero where masked."""
    first = mask.index(True) if True in mask else 0
    log_ratios = [a - b for a, b in zip(logprobs, old, strict=True)]

    def weight(t, k):
        return trace_weight(t - first + 1, k - first + 1, decay, style) if mask[k] and high[k] else 0.0

    def inside(k, a):
        ratio = float(log_ratios[k].detach().exp())
        return ratio <= 1 + clip_high if a > 0 else ratio >= 1 - clip_low

    def bounded(ratio):
        return min(max(ratio, 1 - clip_low), 1 + clip_high)

    out = []
    for t in range(len(mask)):
        if not mask[t]:
            out.append(0.0 * logprobs[t])
            continue
        past = sum((weight(t, k) * log_ratios[k] for k in range(first, t)), start=0.0 * logprobs[t])
        own, a, ratio = weight(t, t) * log_ratios[t], advantage[t], log_ratios[t].exp()
        if clip == "inside":
            low, high_log = math.log(1 - clip_low), math.log(1 + clip_high)
            limited = [x.clamp(low, high_log) for x in log_ratios]
            past = sum((weight(t, k) * limited[k] for k in range(first, t)), start=0.0 * logprobs[t])
            own = weight(t, t) * limited[t]
        traced = (past + own).exp()
        if clip == "inside":
            out.append(-traced * a)
        elif clip == "traced":
            out.append(-min(traced * a, bounded(traced) * a))
        else:
            e = min(past.detach().exp(), max_weight)
            # The gradient of l_k without its value, for each k that may be pushed by A_t.
            moved = [weight(t, k) * (log_ratios[k] - log_ratios[k].detach()) for k in range(t) if inside(k, a)]
            out.append(-e * min(ratio * a, bounded(ratio) * a) - e * bounded(ratio.detach()) * a * sum(moved))
    return out


def ratio_frame_gradient(log_ratios, advantage, weight, clip_low, clip_high):
    """C_k = Σ_t 1[t not clipped] A_t R_t w(t, k), log R_t = Σ_k w(t, k) l_k, of one trajectory; any w."""
    steps = range(len(log_ratios))
    out = [0.0] * len(log_ratios)
    for t in steps:
        ratio, a = math.exp(sum(weight(t + 1, k + 1) * log_ratios[k] for k in steps)), advantage[t]
        clipped = (a > 0 and ratio > 1 + clip_high) or (a < 0 and ratio < 1 - clip_low)
        for k in steps:
            out[k] += 0.0 if clipped else a * ratio * weight(t + 1, k + 1)
    return out


def high_entropy(entropies, mask, keep):
    """True where a trained token is among the ⌈keep·n⌉ largest entropies (ties kept)."""
    trained = sorted((h for h, m in zip(entropies, mask, strict=True) if m), reverse=True)
    if not trained:
        return [False] * len(mask)
    threshold = trained[math.ceil(keep * len(trained) - 1e-9) - 1]
    return [bool(m and h >= threshold) for h, m in zip(entropies, mask, strict=True)]


# --- counterfactuals and retries ---


def levenshtein_table(first, second):
    """The whole table of edit distances of prefixes."""
    table = [[i + j if i == 0 or j == 0 else 0 for j in range(len(second) + 1)] for i in range(len(first) + 1)]
    for i in range(1, len(first) + 1):
        for j in range(1, len(second) + 1):
            same = table[i - 1][j - 1] + (first[i - 1] != second[j - 1])
            table[i][j] = min(same, table[i - 1][j] + 1, table[i][j - 1] + 1)
    return table


def edit_masks(first, second):
    """Every (mask of first, mask of second) of a shortest alignment, by walking all of them; for short sequences."""
    table, masks = levenshtein_table(first, second), set()

    def walk(i, j, left, right):
        if i == j == 0:
            masks.add((tuple(k in left for k in range(len(first))), tuple(k in right for k in range(len(second)))))
            return
        if i and j and first[i - 1] == second[j - 1] and table[i][j] == table[i - 1][j - 1]:
            walk(i - 1, j - 1, left, right)
        if i and j and table[i][j] == table[i - 1][j - 1] + 1:
            walk(i - 1, j - 1, left | {i - 1}, right | {j - 1})
        if i and table[i][j] == table[i - 1][j] + 1:
            walk(i - 1, j, left | {i - 1}, right)
        if j and table[i][j] == table[i][j - 1] + 1:
            walk(i, j - 1, left, right | {j - 1})

    walk(len(first), len(second), frozenset(), frozenset())
    return masks


def repair_share(uids, parents, right):
    """Share of each trajectory's revisions that are right, 0 without one."""
    out = []
    for uid in uids:
        mine = [r for p, r in zip(parents, right, strict=True) if p == uid]
        out.append(sum(mine) / len(mine) if mine else 0.0)
    return out


def pair_up(group, correct, valid, most, only_correct):
    """(wrong, reference) pairs: correct siblings first, both kinds cyclically from the next row of the group on."""
    out = []
    for row in range(len(group)):
        if correct[row] or not valid[row]:
            continue
        later = [r for r in range(row + 1, len(group)) if group[r] == group[row] and valid[r]]
        earlier = [r for r in range(row) if group[r] == group[row] and valid[r]]
        right = [r for r in later + earlier if correct[r]]
        wrong = [] if only_correct else [r for r in later + earlier if not correct[r]]
        out += [(row, r) for r in (right + wrong)[:most]]
    return out


def improvement_reward(reward, first, alpha):
    """SCoRe's stage-two reward, pair by pair."""
    return [r if f < 0 else r + alpha * (r - reward[f]) for r, f in zip(reward, first, strict=True)]


def shaped_loss(logprobs, old, advantage, gamma, clip_low, clip_high):
    """Critique-GRPO, token by token: −A p/(p + γ) where γ > 0, PPO's clipped loss elsewhere."""
    plain = token_loss(logprobs, old, advantage, clip_low, clip_high)
    rows = zip(logprobs, advantage, gamma, plain, strict=True)
    return [-a * new.exp() / (new.exp() + g) if g else x for new, a, g, x in rows]


# --- values at segment boundaries ---


def immediate_values(probability, prompt, response, bounds, exit_text, answers, end, normalise):
    """v̂ at each boundary of one response from `probability(context, text)`; answers are (text, reward)."""
    values = []
    for bound in bounds:
        weighted = []
        for answer, reward in answers:
            p = probability(prompt + response[:bound] + exit_text, answer + end)
            weighted.append(reward * (p ** (1 / len(answer + end)) if normalise else p))
        values.append(sum(weighted) / (len(weighted) if normalise and weighted else 1))
    return values


def solution_values(
    probability, prompt, response, bounds, bank, exit_text, answer_end, solution_lead, length_normalise
):
    """v̂ at each boundary of one response: the mean over (solution, answer, reward) of p(u) p(y | u) reward."""
    values = []
    for bound in bounds:
        state = prompt + response[:bound]
        weighted = []
        for solution, answer, reward in bank:
            before = state + ("" if state[-1].isspace() else solution_lead)
            p = probability(before, solution)
            p *= probability(before + solution + exit_text, answer + answer_end)
            count = len(solution + answer + answer_end)
            weighted.append(reward * (p ** (1 / count) if length_normalise else p))
        values.append(sum(weighted) / len(weighted))
    return values


def exact_value(policy, prompt, state, length, reward):
    """v(state): sum over every way to fill up a response to `length` characters."""
    if len(state) == length:
        return reward(state)
    return sum(
        p * exact_value(policy, prompt, state + c, length, reward) for c, p in policy.next(prompt + state).items()
    )
