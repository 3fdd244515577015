"""Teacher-forced log-probs and entropies of tokens given contexts, and their gradients with respect to the context."""

from typing import Any

import torch
from torch import Tensor

from creditgraph.components.engine.local.batches import blocks, scoring_batches
from creditgraph.components.engine.local.decoder import Decoder
from creditgraph.components.engine.local.sampling import chosen
from creditgraph.pipeline.core.handles import Scores
from creditgraph.pipeline.core.jagged import Jagged


def token_scores(
    decoder: Decoder, hidden: Tensor, places: Tensor, targets: Tensor, temperature: float, top: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs and entropies, float32 [M], of tokens `targets` [M] after rows `places` [M] of hidden states [·, C].

    Then the `top` most likely tokens, int64 [M, top], and their log-probs, float32 [M, top].

    Logits of the whole vocabulary exist for one block of tokens at a time.
    """
    logprobs = torch.zeros(len(places))
    entropies = torch.zeros(len(places))
    best = torch.zeros(len(places), top, dtype=torch.int64)
    best_logprobs = torch.zeros(len(places), top)
    for block in blocks(len(places), decoder.vocab_size):
        logits = decoder.logits(hidden[places[block].to(decoder.device)])
        lp, entropy = chosen(logits, targets[block].to(decoder.device), temperature or 1.0)
        logprobs[block] = lp.cpu()
        entropies[block] = entropy.cpu()
        if top:
            values, ids = torch.log_softmax(logits.float() / (temperature or 1.0), -1).topk(top)
            best[block], best_logprobs[block] = ids.cpu(), values.cpu()
    return logprobs, entropies, best, best_logprobs


@torch.inference_mode()
def score(
    decoder: Decoder, context: Jagged, tokens: Jagged, temperature: float, batch_tokens: int, top: int = 0
) -> Scores:
    """Scores `tokens` given `context`, row by row.

    Args:
        decoder: the model.
        context: int32 [N rows], at least one token in each row that has tokens to score.
        tokens: int32 [N rows].
        temperature: temperature of the softmax; 0 counts as 1, as in generation.
        batch_tokens: padded tokens per forward pass; a longer row goes alone.
        top: how many of the most likely tokens of each place to score too, at most the vocabulary.
    """
    logprobs = torch.zeros(len(tokens.values))
    entropies = torch.zeros(len(tokens.values))
    top = min(top, decoder.vocab_size)
    best = torch.zeros(len(tokens.values), top, dtype=torch.int64)
    best_logprobs = torch.zeros(len(tokens.values), top)
    for batch in scoring_batches(context, tokens, batch_tokens):
        hidden = decoder.hidden(batch.padded.to(decoder.device))
        hidden = hidden.reshape(-1, hidden.shape[-1])
        places = batch.row * batch.padded.shape[1] + batch.column
        found = token_scores(decoder, hidden, places, batch.target, temperature, top)
        for out, values in zip((logprobs, entropies, best, best_logprobs), found, strict=True):
            out[batch.flat] = values
    return Scores(
        logprobs=tokens.with_values(logprobs),
        entropies=tokens.with_values(entropies),
        top_tokens=best if top else None,
        top_logprobs=best_logprobs if top else None,
    )


@torch.enable_grad()
def attribute(model: Any, context: Jagged, tokens: Jagged, temperature: float, batch_tokens: int) -> Jagged:
    """Σ_d (∂ log p(tokens | context) / ∂e_{t,d}) e_{t,d} for each context token t, float32.

    Args:
        model: a transformers causal language model; only its input embeddings get gradients.
        context, tokens: Jagged int32 [N rows]; a row without tokens gets zeros.
        temperature: temperature of the softmax; 0 counts as 1.
        batch_tokens: padded tokens per pass; a longer row goes alone.
    """
    out = torch.zeros(len(context.values))
    for batch in scoring_batches(context, tokens, batch_tokens):
        embedded = model.get_input_embeddings()(batch.padded.to(model.device)).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[
            batch.row.to(model.device), batch.column.to(model.device)
        ]
        logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
        total = logprobs.gather(1, batch.target.to(model.device)[:, None]).sum()
        (gradient,) = torch.autograd.grad(total, embedded)
        product = (gradient.float() * embedded.detach().float()).sum(-1).cpu()
        before = context.select(batch.rows)
        flat = context.offsets[:-1][batch.rows][before.row_ids] + before.positions
        out[flat] = product[before.row_ids, before.positions]
    return context.with_values(out)
