"""Llama 2 and 3.x."""

from mbridge.models.llama import LLaMABridge

from creditgraph.components.learner.megatron.families.family import Family

LLAMA = Family(LLaMABridge)
