"""Qwen2, Qwen2.5 and Qwen3, dense."""

from __future__ import annotations

from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge

from components.learner.megatron.families.family import Family

QWEN2 = Family(Qwen2Bridge)
QWEN3 = Family(Qwen3Bridge)
