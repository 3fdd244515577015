"""GAE with the values of a critic, right and with the errors that people make in it."""

import torch


def swept(token_level_rewards, values, response_mask, gamma, lam, delta_of):
    out = torch.zeros_like(values)
    last, after = 0.0, torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        inside = response_mask[:, t]
        delta = delta_of(t, token_level_rewards[:, t], values, after)
        last = (delta + gamma * lam * last) * inside
        after = torch.where(inside > 0, values[:, t], after)
        out[:, t] = last
    return out * response_mask


def gae(token_level_rewards, values, response_mask, gamma=0.99, lam=0.95):
    def delta(t, r, v, after):
        return r + gamma * after - v[:, t]

    return swept(token_level_rewards, values, response_mask.float(), gamma, lam, delta)


def whitened(token_level_rewards, values, response_mask, gamma, lam):
    """verl: integer masks, required γ and λ, whitening over the tokens of the batch, (advantages, returns)."""
    left_out = 1 - response_mask
    own = gae(token_level_rewards, values, 1 - left_out, gamma, lam)
    inside = own[response_mask > 0]
    return (own - inside.mean()) / (inside.std() + 1e-8) * response_mask, own + values


def with_dones(rewards, values, dones, mask, gamma: float = 0.99, gae_lambda: float = 0.95):
    """One stream of all tokens, as of an environment: the sum starts again after a token that ends a row."""
    out = torch.zeros_like(values)
    carried, after = 0.0, 0.0
    for i, t in reversed(mask.nonzero().tolist()):
        ends = float(dones[i, t])
        delta = float(rewards[i]) * ends + gamma * after * (1 - ends) - float(values[i, t])
        carried = delta + gamma * gae_lambda * carried * (1 - ends)
        out[i, t], after = carried, float(values[i, t])
    return out


def dones_ignored(rewards, values, dones, mask, gamma: float = 0.99, gae_lambda: float = 0.95):
    out = torch.zeros_like(values)
    carried, after = 0.0, 0.0
    for i, t in reversed(mask.nonzero().tolist()):
        delta = float(rewards[i]) * float(dones[i, t]) + gamma * after - float(values[i, t])
        carried = delta + gamma * gae_lambda * carried
        out[i, t], after = carried, float(values[i, t])
    return out


def values_early(token_level_rewards, values, response_mask, gamma=0.99, lam=0.95):
    """values[:, 1:] with a 0 at the end: those of the states after each token."""
    moved = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], dim=1)
    return gae(token_level_rewards, moved, response_mask, gamma, lam)


def values_late(token_level_rewards, values, response_mask, gamma=0.99, lam=0.95):
    moved = torch.cat([torch.zeros(len(values), 1), values[:, :-1]], dim=1) * response_mask
    return gae(token_level_rewards, moved, response_mask, gamma, lam)


def same_token(token_level_rewards, values, response_mask, gamma=0.99, lam=0.95):
    def delta(t, r, v, after):
        return r + gamma * v[:, t] - v[:, t]

    return swept(token_level_rewards, values, response_mask.float(), gamma, lam, delta)


def never_ends(token_level_rewards, values, response_mask, gamma=0.99, lam=0.95):
    """At the last token the value is taken for that of the next one."""

    def delta(t, r, v, after):
        ends = response_mask[:, t].bool() & (~response_mask[:, t + 1].bool() if t + 1 < v.shape[1] else True)
        return r + gamma * torch.where(ends, v[:, t], after) - v[:, t]

    return swept(token_level_rewards, values, response_mask.float(), gamma, lam, delta)


def lambda_alone(token_level_rewards, values, response_mask, gamma=0.99, lam=0.95):
    def delta(t, r, v, after):
        return r + gamma * after - v[:, t]

    return swept(token_level_rewards, values, response_mask.float(), 1.0, lam, delta)


def returns(token_level_rewards, values, response_mask, gamma=0.99, lam=0.95):
    return (gae(token_level_rewards, values, response_mask, gamma, lam) + values) * response_mask


def over_baseline(token_level_rewards, reward_baselines, response_mask):
    """ReMax: the reward of the greedy response is the baseline."""
    own = token_level_rewards.sum(1) - reward_baselines
    return own[:, None] * response_mask


RIGHT = (gae, whitened, with_dones, over_baseline)
WRONG = {
    values_early: "values are shifted by one: V of the next token is read",
    values_late: "values are shifted by one: V of the previous token is read",
    same_token: "it bootstraps from V of the same token, not of the next one",
    never_ends: "after the last token it bootstraps from the last value",
    lambda_alone: "δ is added up with λ alone, not γλ",
    returns: "it returns returns (advantage plus value), not advantages",
    dones_ignored: "`dones` are ignored",
}
