import pytest

from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.payloads import Weights


@pytest.fixture(scope="module")
def policy():
    """The embedded model."""
    engine = LocalEngine(LocalEngine.Config())
    engine.setup(Context(node="engine", model=ModelSpec(path="tiny")))
    yield engine.run(weights=Weights(version=0)).policy
    engine.close()
