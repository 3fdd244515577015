"""Gradient × input embedding: how much each context token moves the log-prob of what follows."""

from __future__ import annotations

from typing import Any

import torch

from pipeline.core.jagged import Jagged


@torch.enable_grad()
def attribute(
    model: Any, context: Jagged, tokens: Jagged, temperature: float, device: str, batch_tokens: int
) -> Jagged:
    """Σ_d (∂ log p(tokens | context) / ∂e_{t,d}) e_{t,d} for each context token t, float32.

    Args:
        model: a transformers causal language model; only its input embeddings get gradients.
        context, tokens: Jagged int32 [N rows]; a row without tokens gets zeros.
        temperature: of the softmax; 0 counts as 1.
        device: where the model lives.
        batch_tokens: padded tokens per pass; a longer row goes alone.
    """
    out = torch.zeros(len(context.values))
    total = context.lengths + tokens.lengths
    order = torch.argsort(total)
    order = order[tokens.lengths[order] > 0]
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and (end + 1 - start) * int(total[order[end]]) <= batch_tokens:
            end += 1
        rows = order[start:end]
        start = end
        before, after = context.select(rows), tokens.select(rows)
        padded = torch.zeros(len(rows), int(total[rows].max()), dtype=torch.int64)
        padded[before.row_ids, before.positions] = before.values.to(torch.int64)
        columns = before.lengths[after.row_ids] + after.positions
        padded[after.row_ids, columns] = after.values.to(torch.int64)
        embedded = model.get_input_embeddings()(padded.to(device)).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[
            after.row_ids.to(device), (columns - 1).to(device)
        ]
        logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
        chosen = logprobs.gather(1, after.values.to(device, torch.int64)[:, None]).sum()
        (gradient,) = torch.autograd.grad(chosen, embedded)
        product = (gradient.float() * embedded.detach().float()).sum(-1).cpu()
        flat = context.offsets[:-1][rows][before.row_ids] + before.positions
        out[flat] = product[before.row_ids, before.positions]
    return context.with_values(out)
