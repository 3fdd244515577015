"""The description of a model family."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from creditgraph.components.learner.megatron.layers.parts import Parts


@dataclass(frozen=True)
class Family:
    """Properties of a model type that its configuration does not contain.

    Attributes:
        bridge: mbridge's class: names of the tensors, and the TransformerConfig.
        adapt: changes the specification of a megatron-core layer, made of the given parts, into the family's.
        whole_key_heads: whether each key-value head must be on one tensor-parallel rank only.
    """

    bridge: type[Any]
    adapt: Callable[[Any, Parts], None] | None = None
    whole_key_heads: bool = False
