"""`engine.sglang`: sampling and scoring by SGLang servers."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditgraph.components.engine.base import ENGINE_METRICS
from creditgraph.components.engine.external import EXTERNAL_METRICS, ExternalEngine
from creditgraph.components.engine.served.dialect import ServedModel
from creditgraph.components.engine.sglang.dialect import SGLangDialect
from creditgraph.components.engine.sglang.settings import SGLangSettings
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError

_INSTALL = (
    "SGLang pins another torch, so give it an environment of its own (python -m venv .venv-sglang; "
    ".venv-sglang/bin/pip install sglang) and set engine.process.python=.venv-sglang/bin/python, or use engine=vllm "
    "or engine=local."
)


class SGLangEngine(ExternalEngine):
    """Samples and scores with SGLang: a pool of servers.

    A group shares its prompt through the prefix cache. Log-probs are those at the sampling temperature and before
    truncation, as engine.local gives them. Entropies, and scores at other temperatures than 1, need the whole
    vocabulary's log-probs from SGLang, so they are NaN for vocabularies above `entropy_vocab`. Seeds have an effect,
    because SGLang runs in its deterministic mode.
    """

    metrics = (*ENGINE_METRICS, *EXTERNAL_METRICS)

    @dataclass(frozen=True, kw_only=True)
    class Config(SGLangSettings):
        """Settings."""

    config: Config
    # Below the lower limit, SGLang samples greedily.
    temperatures = (1e-5, math.inf)

    @classmethod
    def lacks(cls, node: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """SGLang, where servers are to be started here."""
        return _missing(node.config)

    def setup(self, context: Context) -> None:
        """Starts or connects to the servers."""
        for sentence in _missing(self.config):
            raise ConfigError(sentence)
        super().setup(context)

    def dialect(self, model: ServedModel) -> SGLangDialect:
        """How to start SGLang's servers and communicate with them."""
        return SGLangDialect(self.config, model, self.part)


def _missing(config: SGLangSettings) -> list[str]:
    python = config.process.python
    if not config.servers or config.elsewhere:
        return []
    if python and not Path(python).is_file():
        return [
            f"engine.sglang: expected process.python to be an interpreter that has SGLang, got '{python}', "
            f"which is no file. {_INSTALL}"
        ]
    if not python and importlib.util.find_spec("sglang") is None:
        return [f"engine.sglang: the package sglang is not installed in this environment. {_INSTALL}"]
    return []
