"""Sampling as slowly as its definition, for comparison with the engines."""

import math

import numpy as np
import torch

from creditgraph.pipeline.core.streams import counter_uniform


def slow_generation(model, tokenizer, prompt, seed, sampling, eos, context=10**9, forbidden=()):
    """One request row, a whole forward per token: tokens, log-probs, entropies, thought ends and finish reason."""
    tokens, logprobs, entropies, ends, begin = [], [], [], [], 0
    limit = min(sampling.max_tokens, context - len(prompt))
    thoughts = sampling.thoughts
    for t in range(limit):
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor([[*prompt, *tokens]], device=model.device)).logits[0, -1].double().cpu()
            )
        temperature = sampling.temperature or 1.0
        p = torch.softmax(logits / temperature, -1).tolist()
        allowed = [i for i in range(len(p)) if i not in forbidden]
        if sampling.temperature == 0:
            token = max(allowed, key=lambda i: p[i])
        else:
            kept = sorted(allowed, key=lambda i: -p[i])
            if sampling.top_k:
                kept = kept[: sampling.top_k]
            mass, total = 0.0, sum(p[i] for i in kept)
            nucleus = []
            for i in kept:
                if mass >= sampling.top_p * total and nucleus:
                    break
                nucleus.append(i)
                mass += p[i]
            point = float(counter_uniform(np.array([seed], dtype=np.uint64), t)[0]) * mass
            running = 0.0
            for token in sorted(nucleus):
                running += p[token]
                if running > point:
                    break
        tokens.append(token)
        logprobs.append(math.log(p[token]))
        entropies.append(-sum(x * math.log(x) for x in p if x > 0))
        text = tokenizer.decode(tokens[begin:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        at_end = token in eos
        if at_end and (thoughts is None or thoughts.ends_at_eos or begin == t):
            if ends and begin == t:
                ends.pop()
            return tokens, logprobs, entropies, [*ends, t + 1] if thoughts else [], "eos"
        if thoughts is None:
            if any(s in text for s in sampling.stop):
                return tokens, logprobs, entropies, [], "stop"
        elif at_end or thoughts.stop in text or t + 1 - begin >= thoughts.max_tokens:
            ends.append(t + 1)
            begin = t + 1
            if thoughts.final in text:
                return tokens, logprobs, entropies, ends, "final"
            if len(ends) >= thoughts.max_thoughts:
                return tokens, logprobs, entropies, ends, "thoughts"
    if thoughts and tokens and begin < len(tokens):
        ends.append(len(tokens))
    return tokens, logprobs, entropies, ends, "length"
