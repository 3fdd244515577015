"""Published faults of losses, rebuilt from what their threads say, each with a repaired form."""

import torch


def surrogate(logprobs, old_logprobs, advantages, clip=0.2):
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def mean_of_means(logprobs, old_logprobs, advantages, mask, micro_batch_size: int = 6):
    """Each micro-batch is divided by its own number of tokens."""
    parts = []
    for rows in torch.arange(len(mask)).split(micro_batch_size):
        loss = surrogate(logprobs[rows], old_logprobs[rows], advantages[rows])
        parts.append((loss * mask[rows]).sum() / mask[rows].sum())
    return torch.stack(parts).mean()


def mean_of_batch(logprobs, old_logprobs, advantages, mask, micro_batch_size: int = 6):
    total = mask.sum()
    loss = logprobs.new_zeros(())
    for rows in torch.arange(len(mask)).split(micro_batch_size):
        loss = loss + (surrogate(logprobs[rows], old_logprobs[rows], advantages[rows]) * mask[rows]).sum() / total
    return loss


def by_width(log_prob, old_log_prob, advantages, response_mask):
    """Divided by the width of the batch, which depends on the longest response in it."""
    loss = surrogate(log_prob, old_log_prob, advantages) * response_mask
    return loss.sum(-1).mean() / response_mask.shape[-1]


def by_budget(log_prob, old_log_prob, advantages, response_mask):
    return (surrogate(log_prob, old_log_prob, advantages) * response_mask).sum(-1).mean() / 4096


def padded_scale(logprobs, old_logprobs, advantages, loss_mask):
    """The number of tokens that the loss is divided by counts padding too."""
    return (surrogate(logprobs, old_logprobs, advantages) * loss_mask).sum() / loss_mask.numel()


def trained_scale(logprobs, old_logprobs, advantages, loss_mask):
    return (surrogate(logprobs, old_logprobs, advantages) * loss_mask).sum() / loss_mask.sum()


def idle_weight(logprobs, old_logprobs, advantages, token_mask, nll_weight: float = 0.1):
    """The weight of the likelihood term is read, and the term is never added."""
    loss = surrogate(logprobs, old_logprobs, advantages)
    likelihood = -logprobs * (advantages > 0)
    _ = nll_weight * (likelihood * token_mask).sum()
    return (loss * token_mask).sum() / token_mask.sum()


def used_weight(logprobs, old_logprobs, advantages, token_mask, nll_weight: float = 0.1):
    loss = surrogate(logprobs, old_logprobs, advantages) - nll_weight * logprobs * (advantages > 0)
    return (loss * token_mask).sum() / token_mask.sum()


BUGS = {
    "prime-rl#583": ("loss_cut", mean_of_means, mean_of_batch),
    "verl#3741": ("loss_padding", by_width, by_budget),
    "prime-rl#674": ("loss_padding", padded_scale, trained_scale),
    "NeMo-RL#3792": ("loss_settings", idle_weight, used_weight),
}
