"""The fixed sequence by which an engine shows that it computes with the weights it was given, and its log-probs."""

_TOKENS = 16


def fixed_tokens(vocab_size: int, context_length: int) -> tuple[int, ...]:
    """Ids spread over the vocabulary, at most 16 and at most `context_length` of them (0: no limit)."""
    return tuple((7919 * n + 13) % vocab_size for n in range(min(_TOKENS, context_length or _TOKENS)))
