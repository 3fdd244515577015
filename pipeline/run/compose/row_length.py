"""The longest row that a graph's nodes may have the policy sample or score, before anything is loaded."""

from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.payloads import Prompts
from creditgraph.pipeline.core.sockets import Node

# Around responses that a row shows: instructions, a chat template, an exit text with an answer.
TEMPLATE_TOKENS = 1024


def longest_row(graph: Graph) -> int:
    """Most tokens of prompt plus response in any row of the graph; 0 if no node limits its prompts.

    A row has the data's prompt (`max_tokens` of the node that draws them), what its node samples (`max_tokens` there),
    and the responses that it shows or that the node scores something after (`Component.shown_responses`), each as long
    as the longest that any node samples. Text that is encoded a second time may have a few tokens more; a row without
    room is counted by the engine (`rows_without_room`), or refused when it is scored.

    >>> from creditgraph.pipeline.core.graph import build_graph
    >>> nodes = {"prompts": {"use": "prompts.dataset", "config": {"max_tokens": 300}}}
    >>> longest_row(build_graph({"nodes": nodes}))
    300
    """
    sources = [n for n in graph.nodes if n.outputs_of(Prompts) and not n.sockets.inputs]
    prompt = max((_tokens(node) for node in sources), default=0)
    if not prompt:
        return 0
    users = [n for n in graph.nodes if any(socket.carries(Policy) for socket in n.sockets.inputs.values())]
    response = max(map(_tokens, users), default=0)
    rows = [prompt]
    for node in users:
        shown = node.cls.shown_responses(node.config)
        rows.append(prompt + _tokens(node) + shown * response + (TEMPLATE_TOKENS if shown else 0))
    return max(rows)


def _tokens(node: Node) -> int:
    return int(getattr(node.config, "max_tokens", 0))
