"""The description of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """Properties of a model type that its configuration does not contain.

    Attributes:
        bridge: mbridge's class: names of the tensors, and the TransformerConfig.
        adapt: changes a specification of megatron-core's local layer into the family's.
        pre_norm: whether norms come before attention and MLP, where TransformerEngine's fused layers have them.
        whole_key_heads: whether each key-value head must be on one tensor-parallel rank only.
    """

    bridge: type[Any]
    adapt: Callable[[Any], None] | None = None
    pre_norm: bool = True
    whole_key_heads: bool = False
