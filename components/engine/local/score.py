"""Teacher-forced log-probs and entropies: length-sorted batches under a token budget, vocabulary-wide rows in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from components.engine.local.decoder import Decoder
from components.engine.local.sampling import blocks, chosen
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Scores


@torch.inference_mode()
def score(
    decoder: Decoder, context: Jagged, tokens: Jagged, temperature: float, device: str, batch_tokens: int
) -> Scores:
    """Scores `tokens` given `context`, row by row.

    Args:
        decoder: the model.
        context: int32 [N rows], at least one token in each row that has tokens to score.
        tokens: int32 [N rows].
        temperature: of the softmax; 0 counts as 1, as in generation.
        device: where the model lives.
        batch_tokens: padded tokens per forward pass; a longer row goes alone.
    """
    before, after = context.lengths, tokens.lengths
    total = before + after
    logprobs, entropies = torch.zeros(len(tokens.values)), torch.zeros(len(tokens.values))
    order = torch.argsort(total)
    order = order[after[order] > 0]
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and (end + 1 - start) * int(total[order[end]]) <= batch_tokens:
            end += 1
        rows = order[start:end]
        start = end
        padded, places, targets, flat = _batch(context, tokens, rows)
        hidden = decoder.hidden(padded.to(device))
        wanted = hidden.reshape(-1, hidden.shape[-1])
        for block in blocks(len(places), decoder.vocab_size):
            logits = decoder.logits(wanted[places[block].to(device)])
            lp, ent = chosen(logits, targets[block].to(device), temperature or 1.0)
            logprobs[flat[block]], entropies[flat[block]] = lp.cpu(), ent.cpu()
    return Scores(logprobs=tokens.with_values(logprobs), entropies=tokens.with_values(entropies))


def _batch(context: Jagged, tokens: Jagged, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Left-aligned token rows [B, T]; for each scored token: the flat place that predicts it, itself, and its place in `tokens`."""
    before, after = context.select(rows), tokens.select(rows)
    lengths = before.lengths + after.lengths
    longest = int(lengths.max())
    padded = torch.zeros(len(rows), longest, dtype=torch.int64)
    padded[before.row_ids, before.positions] = before.values.to(torch.int64)
    columns = before.lengths[after.row_ids] + after.positions
    padded[after.row_ids, columns] = after.values.to(torch.int64)
    places = after.row_ids * longest + columns - 1
    flat = tokens.offsets[:-1][rows][after.row_ids] + after.positions
    return padded, places, after.values.to(torch.int64), flat
