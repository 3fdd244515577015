"""Why each rollout has its credit, as the components of a graph say in `explain`."""

from typing import Any

from creditgraph.pipeline.app.report.source import RunSource
from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.payloads import Credit
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.run.values import as_inputs


def reasons(run: RunSource, iteration: int) -> dict[int, str]:
    """uid → what the nodes with `explain` say about that row, in the order of the graph; notes what they lack."""
    texts: dict[int, str] = {}
    for node in run.graph.nodes if run.graph is not None else ():
        if node.cls.explain is Component.explain:
            continue
        for uid, text in _of_node(run, node, iteration).items():
            own = f"{node.name} ({node.use}): {text}"
            texts[uid] = f"{texts[uid]}\n{own}" if uid in texts else own
    return texts


def _of_node(run: RunSource, node: Node, iteration: int) -> dict[int, str]:
    outputs = {name: run.read(f"{node.name}.{name}", iteration) for name in node.sockets.outputs}
    credit = next((value for value in outputs.values() if isinstance(value, Credit)), None)
    if credit is None:
        return {}
    by_socket: dict[str, list[Any]] = {}
    for socket, wire in node.all_wires:
        by_socket.setdefault(socket, []).append(run.read(f"{wire.source}.{wire.output}", iteration - wire.delay))
    component = node.cls(node.config)
    component.context.iteration = iteration
    # Code of a plug-in, given records that may lack what it reads: what it raises must not cost the report.
    try:
        texts = [str(text) for text in component.explain(outputs, **as_inputs(node, by_socket))]
    except Exception as error:
        missing = [socket for socket, values in by_socket.items() if any(value is None for value in values)]
        reason = f"its inputs {', '.join(missing)} are not recorded" if missing else f"{type(error).__name__}: {error}"
        run.note(f"why credit is as it is: {node.name} ({node.use}) could not say ({reason})")
        return {}
    if texts and len(texts) != len(credit):
        run.note(f"why credit is as it is: {node.name} ({node.use}) gave {len(texts)} texts for {len(credit)} rows")
        return {}
    return dict(zip(credit.uid.tolist(), texts, strict=False))
