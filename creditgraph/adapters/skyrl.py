"""Credit graphs in SkyRL, as advantage estimators named "creditgraph:GRAPH".

Import it in the script that starts training, before `ray.init`; then `trainer.algorithm.advantage_estimator` takes the
name:

    import creditgraph.adapters.skyrl

SkyRL passes rewards, masks, uids and a critic's values, no token ids: what `creditgraph.adapters.verl` says of states
holds here as well. Written after reading its registry (commit a9564572e); not yet run with SkyRL.
"""

from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry

from creditgraph.adapters.estimator import PREFIX, Estimator, States
from creditgraph.adapters.graph import graph_names


def register(graph: str, *overrides: str, name: str = "", states: States | None = None) -> None:
    """Registers a graph as an estimator; the arguments are those of `creditgraph.adapters.verl.register`."""
    AdvantageEstimatorRegistry.register(name or PREFIX + graph, Estimator(graph, *overrides, states=states))


for _graph in graph_names():
    register(_graph)
