"""`creditgraph values`: values of recorded rollouts from continuations of any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from creditgraph.pipeline.app.arguments import add_settings, add_trust
from creditgraph.pipeline.core.errors import ConfigError

SUMMARY = "Sample values at boundaries of recorded rollouts from a server, as the truth that credit is shown with."
FREE_TOKENS = 100_000  # sampled at most, beyond which --yes is expected


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = (
        "examples:\n"
        "  creditgraph values runs/trl --endpoint http://localhost:8000/v1 --model NAME --verifier verifier.math\n"
        "  creditgraph values runs/verl --endpoint URL --model NAME --segmenter fixed --verifier mine.py:reward\n\n"
        "A key for the server goes into the environment variable OPENAI_API_KEY. The server must hold the weights that "
        "sampled the rollouts, or the values are those of another policy."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory with recorded rollouts")
    parser.add_argument("--endpoint", required=True, metavar="URL", help="such as http://localhost:8000/v1")
    parser.add_argument("--model", required=True, metavar="NAME", help="the name that the server gives the model")
    parser.add_argument(
        "--rollouts", type=int, default=16, metavar="N", help="continuations per boundary (default: 16)"
    )
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="rollouts to value (default: 8)")
    parser.add_argument("--iteration", type=int, help="default: the newest recorded one")
    parser.add_argument(
        "--segmenter", default="thought", metavar="NAME", help="thought (default), newline, fixed or a registered one"
    )
    add_settings(parser, "a setting of the segmenter")
    parser.add_argument("--verifier", default="", metavar="NAME|FILE.py:FUNCTION", help="default: the run's")
    parser.add_argument(
        "--max-tokens", type=int, default=0, metavar="N", help="of a whole response (default: the longest recorded)"
    )
    parser.add_argument("--text", action="store_true", help="send text, to a server that takes no token ids")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time (default: 8)")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of a request (default: 300)")
    parser.add_argument("--yes", action="store_true", help=f"sample more than {FREE_TOKENS:,} tokens")


def main(options: argparse.Namespace) -> int:
    """Says what it costs, samples, prints the values and records them in the run."""
    from creditgraph.adapters.sampled_values import Settings, ValueSampler
    from creditgraph.pipeline.run.compose.overrides import parse_settings

    settings = Settings(
        url=options.endpoint,
        model=options.model,
        rollouts=options.rollouts,
        rows=options.rows,
        iteration=options.iteration,
        segmenter=options.segmenter,
        settings=parse_settings(options.set),
        verifier=options.verifier,
        max_tokens=options.max_tokens,
        text=options.text,
        concurrency=options.concurrency,
        seconds=options.seconds,
        key=os.environ.get("OPENAI_API_KEY", ""),
    )
    with ValueSampler(options.run, settings) as sampler:
        plan = sampler.plan()
        requests, most, prompts = plan.cost(settings.rollouts)
        cost = (
            f"{requests:,} requests for {len(plan.rows)} rollouts of iteration {plan.iteration}: at most {most:,} "
            f"sampled tokens and {prompts:,} tokens of prompts"
        )
        print(cost, flush=True)
        if most > FREE_TOKENS and not options.yes:
            raise ConfigError(f"that is more than {FREE_TOKENS:,} tokens; add --yes, or lower --rows or --rollouts.")
        sampled = sampler.sample(plan)
        sampler.record(plan, sampled)
    errors = sampled.values.errors
    assert errors is not None
    for i, uid in enumerate(plan.rows.uid.tolist()):
        pairs = zip(sampled.values.values.row(i).tolist()[:-1], errors.row(i).tolist(), strict=False)
        shown = "  ".join(f"{value:.2f}±{error:.2f}" for value, error in pairs)
        print(f"rollout {uid}: {shown}  → reward {float(plan.rewards.value[i]):g}")
    if sampled.invalid:
        print(f"note: {sampled.invalid:,} continuations could not be verified and count as 0")
    counted = f"{sampled.tokens:,} tokens were sampled; " if sampled.tokens >= 0 else ""
    print(f"{counted}recorded in {options.run / 'record'}; next: creditgraph credit recipe=NAME {options.run}")
    return 0
