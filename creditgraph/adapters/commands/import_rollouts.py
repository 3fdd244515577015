"""`creditgraph import`: rollouts of another trainer as a run directory, which the other commands read."""

from __future__ import annotations

import argparse
from pathlib import Path

from creditgraph.pipeline.app.arguments import add_output
from creditgraph.pipeline.core.errors import ConfigError

SUMMARY = "Make a run directory of another trainer's rollouts, for report, credit, replay, audit and localization."
FORMATS = ("trl", "verl", "prime-rl", "verifiers", "slime", "jsonl")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph import out/completions --from trl --tokenizer Qwen/Qwen3-0.6B\n"
        "  creditgraph import rollouts/*.jsonl --from verl --tokenizer Qwen/Qwen3-0.6B --graph grpo\n"
        "  creditgraph import outputs/run --from prime-rl\n"
        "  creditgraph import mine.jsonl --from jsonl --columns reward=score --graph gigpo advantage.omega=0.5"
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILES", help="files or folders, then settings of --graph (key=value)"
    )
    parser.add_argument("--from", dest="format", required=True, choices=FORMATS, help="what wrote them")
    add_output(parser, "DIR", "run directory (default: runs/FORMAT)", type=Path)
    parser.add_argument("--tokenizer", default="", metavar="FOLDER", help="of the model: folder or hub name")
    parser.add_argument("--graph", default="", metavar="NAME", help="a graph that computes the credit")
    parser.add_argument("--endpoint", default="", metavar="URL", help="server that scores texts for `credit`")
    parser.add_argument("--model", default="", metavar="NAME", help="of that server")
    parser.add_argument("--turns", action="store_true", help="a row per turn, not per response")
    parser.add_argument(
        "--rewards",
        nargs="+",
        default=[],
        metavar="column=weight",
        help="of trl and slime: what to add up as the reward",
    )
    parser.add_argument("--columns", nargs="+", default=[], metavar="name=column", help="of jsonl: columns by name")


def main(options: argparse.Namespace) -> int:
    """Writes the run; prints what was read, skipped and lacking."""
    from creditgraph.adapters.imports.formats import FORMATS as READERS
    from creditgraph.adapters.imports.row import Options
    from creditgraph.adapters.imports.write import REASONS, Request, import_files
    from creditgraph.pipeline.app.text import visible

    settings = [text for text in options.files if "=" in text and not Path(text).exists()]
    if settings and not options.graph:
        raise ConfigError(f"{settings[0]}: is a setting of a graph; name the graph with --graph NAME.")
    if bool(options.endpoint) != bool(options.model) or (options.endpoint and not options.tokenizer):
        raise ConfigError("--endpoint URL, --model NAME and --tokenizer FOLDER belong together; expected all three.")
    request = Request(
        files=[Path(text) for text in options.files if text not in settings],
        reader=READERS[options.format],
        target=options.output or Path("runs") / options.format,
        options=Options(rewards=_weights(options.rewards), columns=_pairs(options.columns, "--columns")),
        tokenizer=options.tokenizer,
        graph=options.graph,
        settings=settings,
        turns=options.turns,
        endpoint=options.endpoint,
        model=options.model,
    )
    done = import_files(request)
    rows = sum(done.steps.values())
    print(f"read {rows:,} responses of {len(done.steps)} steps ({min(done.steps)} to {max(done.steps)})")
    skipped = sum(done.skipped.values())
    if skipped:
        print(f"skipped {skipped:,} rows, each with its reason in {done.path / 'rejected.jsonl'}:")
    for reason, count in done.skipped.most_common(REASONS):
        print(f"  {count} × {visible(reason)}")
    for text in done.lacking:
        print(f"note: {visible(text)}")
    print(f"wrote {done.path}; next: creditgraph report {done.path}")
    return 0


def _pairs(texts: list[str], option: str) -> dict[str, str]:
    split = [part for text in texts for part in text.split(",")]
    for text in split:
        if "=" not in text:
            raise ConfigError(f"{option} {text}: expected name=column.")
    return dict(text.split("=", 1) for text in split)


def _weights(texts: list[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for text in ",".join(texts).split(",") if texts else ():
        name, equals, weight = text.rpartition("=")
        try:
            weights[name if equals else text] = float(weight) if equals else 1.0
        except ValueError:
            raise ConfigError(f"--rewards {text}: expected column=weight, such as accuracy_reward=1.") from None
    return weights
