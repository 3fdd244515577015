"""What a run needs and this machine does not have, as far as it is cheap to see: before anything loads."""

from __future__ import annotations

from creditgraph.components.models.load import check_folder
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, GraphError
from creditgraph.pipeline.run.compose.experiment import Experiment


def check_present(experiment: Experiment) -> None:
    """Raises a CreditgraphError with a sentence per setting, file, column, package or model folder that is missing."""
    problems: list[str] = []
    try:
        check_folder(experiment.model.path)
    except CreditgraphError as error:
        problems.append(str(error))
    for node in experiment.graph.nodes:
        try:
            problems += node.cls.lacks(node, experiment.model, experiment.data)
        except CreditgraphError as error:
            problems.append(str(error))
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise GraphError(problems, experiment.run.name)
