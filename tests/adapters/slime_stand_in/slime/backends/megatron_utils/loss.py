"""Log-probs of packed responses."""


def get_rollout_top_p_logprob_kwargs(args, batch):
    """Settings of nucleus sampling: none."""
    return {}


def get_log_probs_and_entropy(logits, *, args, unconcat_tokens, total_lengths, response_lengths):
    """Of logits [1, T, V] of samples behind each other, the log-probs of each response."""
    rows = []
    for part, tokens, n in zip(logits[0].split(total_lengths), unconcat_tokens, response_lengths, strict=True):
        logprobs = part.log_softmax(-1)
        rows.append(logprobs[:-1].gather(1, tokens[1:, None])[:, 0][len(tokens) - 1 - n :])
    return None, {"log_probs": rows}
