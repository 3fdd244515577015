"""The model types that `learner.megatron` trains; a family is one file here and one line per model type."""

from creditgraph.components.learner.megatron.families.family import Family
from creditgraph.components.learner.megatron.families.llama import LLAMA
from creditgraph.components.learner.megatron.families.olmo import OLMO
from creditgraph.components.learner.megatron.families.qwen import QWEN2, QWEN3, QWEN3_MOE

# Model type of transformers' configuration → family.
FAMILIES: dict[str, Family] = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "llama": LLAMA,
    "olmo2": OLMO,
    "olmo3": OLMO,
}
