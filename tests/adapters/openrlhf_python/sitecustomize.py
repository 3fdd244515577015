"""For OpenRLHF without a GPU, in every process of Ray: what it imports of other libraries and never calls here."""

import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

for name in (
    "deepspeed",
    "deepspeed.runtime",
    "deepspeed.runtime.zero",
    "deepspeed.runtime.zero.partition_parameters",
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils",
    "flash_attn.utils.distributed",
    "vllm",
    "vllm.inputs",
    "vllm.utils",
):
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None, is_package=True), __path__=[], __version__="0")
