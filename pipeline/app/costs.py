"""What a configuration costs its engine, from settings alone."""

from creditgraph.pipeline.run.compose.experiment import Experiment


def cost_lines(experiment: Experiment) -> list[str]:
    """Lines for a user: the longest row that engines make room for, and what nodes say of an iteration's cost."""
    rows = experiment.model.max_context or experiment.model.longest_row
    lines = [f"  rows of at most {rows:,} tokens of prompt and response, or as many as the model takes"] if rows else []
    for node in experiment.graph.nodes:
        lines += [f"  {node.name}: {text}" for text in node.cls.costs(node, experiment.graph)]
    return lines
