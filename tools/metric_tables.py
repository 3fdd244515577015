"""The table of logged numbers in docs/reports.md and on the site's pages of components."""

from creditgraph.pipeline.core.metric import Metric


def metric_table(head: str, metrics: tuple[Metric, ...]) -> str:
    """Markdown: name, unit, definition."""
    texts = [f"{m.text.replace('|', '&#124;')}{'; a run warns where it stays 1' if m.alarm else ''}" for m in metrics]
    rows = [f"| `{m.name}` | {m.unit} | {text} |" for m, text in zip(metrics, texts, strict=True)]
    return "\n".join([f"| {head} | unit | definition |", "|---|---|---|", *rows])
