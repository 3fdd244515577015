"""Random tiny models in temporary folders, and engines on them."""

import pytest
import torch

from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.models.experts import unstack
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.handles import Requests
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [*SPECIAL, "</thought>", "\\boxed{", "}", *map(str, range(10)), *"+-*=abcdefghijklmnop"]
TEXT = "Step 1: we know that x = 7; so 3 + 4 = 7. </thought> then \\boxed{7} naïve café 漢字 é 🙂 </s>\n" * 3


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def metaspace_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {
        w: i
        for i, w in enumerate(
            ["<pad>", "<eos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abx=7{}/<>\\", "▁ab", "▁x"]
        )
    }
    backend = Tokenizer(models.BPE(vocab, [("▁", "x")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def build_model(kind, vocab):
    import transformers as tf

    shape = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {"num_key_value_heads": 2}
    shape |= {"max_position_embeddings": 96, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    configs = {
        "qwen2": lambda: tf.Qwen2Config(**shape, tie_word_embeddings=True),
        "qwen3": lambda: tf.Qwen3Config(**shape, head_dim=16),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(
            **shape, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
        ),
        "llama": lambda: tf.LlamaConfig(**shape, attention_bias=True, mlp_bias=True),
        "llama3": lambda: tf.LlamaConfig(
            **shape,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        "gpt2": lambda: tf.GPT2Config(
            vocab_size=vocab,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=96,
            eos_token_id=1,
            bos_token_id=None,
            pad_token_id=0,
        ),
        "gemma2": lambda: tf.Gemma2Config(
            **shape, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0
        ),
    }
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(configs[kind]())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0, 0.1) if "norm" in name or "ln_" in name else p.normal_(0.0, 0.25)
    return model.eval()


@pytest.fixture(scope="session")
def tokenizers():
    """Name → tokenizer, as built (AutoTokenizer may swap parts of a loaded one by model type)."""
    return {"word": word_tokenizer(), "byte": byte_tokenizer(), "metaspace": metaspace_tokenizer()}


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tokenizers):
    """folder(kind, tokenizer) → path of a saved random model; made once each."""
    made = {}

    def make(kind="qwen2", tokenizer="word", extra=0):
        key = (kind, tokenizer, extra)
        if key not in made:
            path, tok = tmp_path_factory.mktemp("model"), tokenizers[tokenizer]
            tok.save_pretrained(path)
            build_model(kind, len(tok) + extra).save_pretrained(path)
            made[key] = str(path)
        return made[key]

    return make


@pytest.fixture(scope="session")
def start(folder, device):
    """start(kind, …) → (policy, the same transformers model)."""

    def make(kind="qwen2", tokenizer="word", extra=0, max_context=0, dtype="float32", **settings):
        from transformers import AutoModelForCausalLM

        path = folder(kind, tokenizer, extra)
        engine = LocalEngine(LocalEngine.Config(**settings))
        engine.setup(Context(device=device, model=ModelSpec(path=path, max_context=max_context, dtype=dtype)))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval().to(device)
        policy = engine.run(weights=Weights(version=3, tensors=dict(unstack(model.state_dict())))).policy
        return policy, model

    return make


@pytest.fixture(scope="session")
def prompts():
    """Ragged prompts of 1 to 24 tokens, valid in every test vocabulary."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 34, (n,), generator=generator).tolist() for n in (5, 1, 24, 11, 11, 17)]


@pytest.fixture(scope="session")
def ask():
    """ask(policy, rows, seeds, **sampling) → completions."""
    from creditgraph.pipeline.core.handles import Sampling

    def run(policy, rows, seeds=None, max_tokens_each=None, max_thoughts_each=None, **sampling):
        return policy.generate(
            Requests(
                tokens=Jagged.from_rows(rows, torch.int32),
                seed=torch.arange(len(rows)) if seeds is None else torch.tensor(seeds),
                sampling=Sampling(**sampling),
                max_tokens=max_tokens_each,
                max_thoughts=max_thoughts_each,
            )
        )

    return run


@pytest.fixture(scope="session")
def users_folder(tmp_path_factory):
    """A folder of a user whose own packages have the names of ours."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("components", "pipeline"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('a package of the user was imported')")
    return folder
