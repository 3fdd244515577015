"""A small random Qwen3-MoE with the embedded tokenizer, and the experts that its routers choose by transformers."""

import torch

from creditgraph.components.models.load import resolve_model_path

LAYERS, EXPERTS, TOP = 3, 8, 2


def make_model(folder):
    """Writes the model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        norm_topk_prob=True,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def own_experts(model, tokens):
    """[tokens − 1, layers, experts per token] of a row, each token's in the order of their numbers."""
    found = torch.zeros(len(tokens) - 1, LAYERS, TOP, dtype=torch.int64)
    hooks = []
    for layer, block in enumerate(model.model.layers):

        def keep(_, inputs, output, layer=layer):
            found[:, layer] = output[2].sort(-1).values

        hooks.append(block.mlp.gate.register_forward_hook(keep))
    model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def wrong_rows(model, prompts, responses, experts):
    """Of rows with experts, those that have other ones than the routers choose; and how many have experts."""
    wrong, known = [], 0
    for row, flat in enumerate(experts.rows()):
        if len(flat):
            known += 1
            own = own_experts(model, [*prompts.row(row).tolist(), *responses.row(row).tolist()])
            if not torch.equal(flat.long().view(-1, LAYERS, TOP).sort(-1).values, own):
                wrong.append(row)
    return wrong, known
