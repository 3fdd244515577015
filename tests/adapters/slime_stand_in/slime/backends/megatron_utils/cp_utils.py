"""Context parallelism, of one rank."""


def slice_log_prob_with_cp(log_prob, total_length, response_length):
    """This rank's part of a response."""
    assert len(log_prob) == response_length <= total_length
    return log_prob


def get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, sample_denoms, calculate_per_token_loss):
    """The sum over samples of the mean over their trained tokens."""

    def sum_of_sample_mean(x):
        parts = zip(x.split(response_lengths), loss_masks, sample_denoms, strict=True)
        return sum((part * mask).sum() / denominator for part, mask, denominator in parts)

    return sum_of_sample_mean
