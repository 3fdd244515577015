"""The `creditgraph` command. Subcommands import what they need when they run, so that --help is quick."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence

from pipeline.core.errors import CreditgraphError, did_you_mean

OVERRIDES_HELP = """\
Overrides are key=value:
  recipe=toy_srpo                 a file of configs/recipe (creditgraph graph --list shows all)
  engine=local  model=tiny        another choice of a config group
  learner.optimizer.lr=1e-4       a setting of a node (creditgraph components NAME lists them)
  sampler.use=sampler.chains      another component for a node
  run.seed=1  run.iterations=20   run settings: name root seed iterations device threads overlap checkpoint.every
A folder ./configs (or --config-dir) adds your own graph/, recipe/, model/, data/ files."""

EPILOG = """\
first steps:
  creditgraph train recipe=toy_srpo             train the embedded model on the embedded task
  creditgraph graph recipe=toy_srpo             see what that is
  creditgraph components                        the reusable steps
  creditgraph COMMAND --help                    all options of a command"""


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(
        prog="creditgraph",
        description="Credit assignment for RL with verifiable rewards, as a declared graph of reusable steps.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, help_text: str, epilog: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=help_text,
            description=help_text,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    train = command("train", "Train, or continue the run of that name.", OVERRIDES_HELP)
    _overrides(train)
    train.add_argument(
        "-m", "--multirun", action="store_true", help="sweep: every combination of comma-separated values, one run each"
    )
    train.add_argument("--check", action="store_true", help="compose and check only; train nothing")

    graph = command("graph", "Draw a graph, or check every shipped graph and recipe.", OVERRIDES_HELP)
    _overrides(graph)
    graph.add_argument("--format", choices=["mermaid", "svg"], help="default: by the ending of -o, else mermaid")
    graph.add_argument("-o", "--output", metavar="FILE", help="write to a file (.mmd, .md or .svg)")
    graph.add_argument(
        "--check-all", action="store_true", help="check all graphs and recipes; loads no model or engine"
    )
    graph.add_argument("--list", action="store_true", help="list recipes and graphs")

    components = command("components", "List components: what each takes and makes, and its paper.")
    components.add_argument(
        "names", nargs="*", metavar="NAME", help="show one component with its settings, or all of a kind (sampler)"
    )
    components.add_argument("--json", action="store_true", help="machine-readable")

    check = command(
        "check",
        "Check a component of yours against the contract.",
        "example:\n  creditgraph check my_package.ideas:MyAdvantage",
    )
    check.add_argument("target", metavar="module:Class", help="or a registered name")

    run_node = command(
        "run-node",
        "Run one component on data of your own (Parquet files).",
        "example:\n  creditgraph run-node advantage.group trajectories=t.parquet rewards=r.parquet -o normalize=mean --output out/",
    )
    run_node.add_argument("use", metavar="COMPONENT", help="registered name or module:Class")
    run_node.add_argument(
        "inputs",
        nargs="*",
        metavar="socket=FILE",
        help="recorded Parquet per input; a socket may be given several times",
    )
    run_node.add_argument(
        "-o", "--set", action="append", default=[], metavar="setting=value", help="a setting of the component"
    )
    run_node.add_argument("--model", default="tiny", help="model folder for a policy input (default: the embedded one)")
    run_node.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    run_node.add_argument("--seed", type=int, default=0)
    run_node.add_argument("--iteration", type=int, default=0, help="part of the key of random streams")
    run_node.add_argument("--output", metavar="DIR", help="write each output as Parquet there")

    replay = command(
        "replay",
        "Run one node of a finished run again, on its recorded inputs, and show what changed.",
        "example:\n  creditgraph replay runs/toy_srpo-s0 --iteration 12 --node advantage -o normalize=mean",
    )
    replay.add_argument("run", metavar="RUN", help="run directory")
    replay.add_argument("--iteration", type=int, required=True)
    replay.add_argument("--node", required=True)
    replay.add_argument(
        "-o", "--set", action="append", default=[], metavar="setting=value", help="a changed setting of the node"
    )
    replay.add_argument("--output", metavar="DIR", help="write each output as Parquet there")

    report = command(
        "report",
        "Write one self-contained HTML page of runs: curves, graph, rollouts with their credit, configuration.",
        "example:\n  creditgraph report runs/toy_srpo-s0 runs/toy_srpo-s1 -o srpo.html",
    )
    report.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories; those that differ by their seed alone share a line"
    )
    report.add_argument("-o", "--output", metavar="FILE", help="default: report.html in the first run")
    report.add_argument("--title", help="heading of the page")
    report.add_argument(
        "--trace", metavar="FILE", help="in place of a page: the first run's timeline, all ranks, for ui.perfetto.dev"
    )

    credit = command(
        "credit",
        "Judge the recorded rollouts of a run by several recipes, side by side, token by token.",
        "example:\n  creditgraph credit recipe=toy_grpo,toy_rredcot,toy_s_trace runs/toy_grpo-s0 --still credit.svg",
    )
    credit.add_argument(
        "arguments",
        nargs="+",
        metavar="recipe=a,b,c RUN",
        help="recipes, settings for all of them (key=value), and a run",
    )
    credit.add_argument(
        "--iteration", type=int, help="default: the newest recorded one whose policy the run can restore exactly"
    )
    credit.add_argument("--rows", type=int, default=6, help="rollouts to show")
    credit.add_argument(
        "--samples", type=int, default=64, help="continuations per thought for the true advantage; 0 leaves it out"
    )
    credit.add_argument("-o", "--output", metavar="FILE", help="default: credit.html in the run")
    credit.add_argument("--still", metavar="FILE", help="also draw the first two rollouts as .svg or .png")
    credit.add_argument(
        "-c", "--config-dir", action="append", default=[], metavar="DIR", help="a folder with graph/, recipe/ … files"
    )

    evaluate = command(
        "eval",
        "Evaluate checkpoints of runs, or models, on a suite of tasks; or a run by the evaluator of its own graph.",
        "examples:\n"
        "  creditgraph eval run=runs/toy_srpo-s0 suite=toy\n"
        "  creditgraph eval run=runs/a,runs/b model=qwen3_4b suite=math engine=vllm tasks=aime_2024,math_500\n"
        "  creditgraph eval model=tiny suite=math data.math_500.path=math_500.jsonl tasks=math_500\n"
        "  creditgraph eval runs/toy_srpo-s0 evaluator.samples=8 evaluator.num_problems=0\n"
        "docs/evaluation.md has all settings.",
    )
    _overrides(evaluate)
    evaluate.add_argument(
        "--fresh", action="store_true", help="throw away what an earlier evaluation of the same name wrote"
    )
    evaluate.add_argument("--compare", action="store_true", help="only compare results that are there; ask nothing")
    _data_commands(command)
    _cluster_commands(command)
    return parser


def _data_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    data = command(
        "data",
        "List the data files of the configuration, or load one and check it: rows, answers, verifier, revision.",
        "examples:\n"
        "  creditgraph data list\n"
        "  creditgraph data check gsm8k\n"
        "  creditgraph data check gsm8k --entry eval --path copies/gsm8k_test.jsonl --rows 1000 --model Qwen/Qwen3-4B",
    )
    data.add_argument("action", choices=["list", "check"])
    data.add_argument("names", nargs="*", metavar="NAME", help="files of configs/data")
    data.add_argument("--entry", help="one entry of the file (train, eval …); default: all")
    data.add_argument(
        "--path", metavar="FILE", help="read this local copy (file or folder) in place of the hub; needs one entry"
    )
    data.add_argument("--rows", type=int, default=2000, help="rows to look at; 0 looks at all (default: 2000)")
    data.add_argument("--model", help="show prompts and count tokens with this model's tokenizer")
    data.add_argument(
        "-c", "--config-dir", action="append", default=[], metavar="DIR", help="a folder with data/ files"
    )

    preview = command(
        "preview",
        "Print exactly the tokens that the model of a recipe sees for its first prompts, and what ends a response.",
        "example:\n  creditgraph preview recipe=srpo_qwen2_5_14b_instruct data.train.path=olympiads.jsonl",
    )
    _overrides(preview)
    preview.add_argument("-n", "--prompts", type=int, default=2, help="prompts to show")
    preview.add_argument("--tokens", type=int, default=400, help="tokens to show of each, from both ends; 0 shows all")


def _cluster_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    submit = command(
        "submit",
        "Check a recipe, render its SLURM job and submit it.",
        "examples:\n"
        "  creditgraph submit recipe=srpo_qwen2_5_14b_instruct cluster=disaggregated cluster.partition=gpu --dry-run\n"
        "  creditgraph submit -m recipe=toy_grpo,toy_srpo run.seed=0,1,2 cluster=one_node\n"
        "  creditgraph submit --eval runs/toy_srpo-s0 cluster=one_node",
    )
    _overrides(submit)
    submit.add_argument(
        "-m", "--multirun", action="store_true", help="one job array over every combination of comma-separated values"
    )
    submit.add_argument("--eval", dest="evaluate", metavar="RUN", help="evaluate a run in place of training")
    submit.add_argument("--dry-run", action="store_true", help="write and print the script; submit nothing")

    status = command("status", "How far a run is, and what SLURM says of its jobs.")
    cancel = command("cancel", "End the jobs of submitted runs.")
    cancel.add_argument(
        "--save", action="store_true", help="let a running learner finish its iteration and checkpoint first"
    )
    for parser in (status, cancel):
        parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")

    logs = command("logs", "Show the logs of a submitted run: job, learner, engines.")
    logs.add_argument("run", metavar="RUN", help="run directory")
    logs.add_argument("role", nargs="?", default="", help="only logs with this in their name: job, learner, engine-0")
    logs.add_argument("-n", "--lines", type=int, default=20)
    logs.add_argument("-f", "--follow", action="store_true", help="print what is appended to the newest one")

    doctor = command("doctor", "Check an installation, a node or a cluster, and say what to fix.")
    doctor.add_argument("--node", action="store_true", help="only what a node of a job needs")
    doctor.add_argument("--shared", metavar="FOLDER", help="also a folder that all nodes must see")
    doctor.add_argument("--quiet", action="store_true", help="print only what failed")

    simulate = command(
        "simulate",
        "Predict how a measured run would go with overlap, and on how many GPUs.",
        "example:\n  creditgraph simulate --measured runs/toy_srpo-s0 --model qwen2.5-7b --gpus 8 64 512 cluster.gpus_per_server=2",
    )
    _overrides(simulate)
    simulate.add_argument(
        "--measured", metavar="RUN", required=True, help="run directory: phases, rows and lengths are taken from it"
    )
    simulate.add_argument("--replicas", type=int, default=1, help="data-parallel replicas of that run")
    simulate.add_argument(
        "--delays", type=int, nargs="+", default=[1, 2], metavar="K", help="learner.weights@K to compare"
    )
    simulate.add_argument("--model", help="a shape of tools/plan_layout, or a config.json: also simulate GPUs")
    simulate.add_argument("--device", default="h100")
    simulate.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    simulate.add_argument("--rollouts", type=int, default=4096, help="of an iteration, on those GPUs")
    simulate.add_argument("--per-gpu", action="store_true", help="--rollouts are per GPU")
    simulate.add_argument("--length", type=float, default=2048, help="mean tokens of a rollout there")
    simulate.add_argument("--prompt", type=float, default=512, help="tokens of a prompt there")
    simulate.add_argument("--seed", type=int, default=0)
    simulate.add_argument("--json", metavar="FILE", help="write the rows of the last table")
    simulate.add_argument("--picture", metavar="FILE", help="draw them (.svg or .png)")

    serve = command("serve", "Run one engine server of a configuration (job scripts do).")
    _overrides(serve)
    serve.add_argument("--index", type=int, default=0, help="number of this server")
    serve.add_argument("--count", type=int, default=1, help="number of servers in all")


def _overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="see below")
    parser.add_argument(
        "-c", "--config-dir", action="append", default=[], metavar="DIR", help="a folder with graph/, recipe/ … files"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code. User mistakes print a sentence and give 2, an interrupt 130."""
    parser = build_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    known = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        print(f"creditgraph: unknown command '{arguments[0]}'.{did_you_mean(arguments[0], known)}", file=sys.stderr)
        return 2
    options, rest = parser.parse_known_args(arguments)
    # argparse stops collecting overrides at the first option; those after it belong to the same list.
    late = [a for a in rest if "=" in a and not a.startswith("-")]
    if rest != late or (rest and not hasattr(options, "overrides")):
        known[options.command].error(
            f"unrecognized arguments: {' '.join(a for a in rest if a not in late) or ' '.join(rest)}"
        )
    if late:
        options.overrides += late
    if not options.command:
        parser.print_help()
        return 0
    # Ranks that lose each other say so themselves; torch would add a page of C++ frames. Read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # components of the user's own, named as module:Class
    try:
        module = importlib.import_module(f"pipeline.app.commands.{options.command.replace('-', '_')}")
        return int(module.main(options) or 0)
    except CreditgraphError as error:
        if os.environ.get("CREDITGRAPH_TRACEBACK"):
            raise
        print(f"creditgraph {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("creditgraph: interrupted", file=sys.stderr)
        if threading.active_count() > 1:
            # The generation thread may be inside a long call; leaving through the interpreter would wait for it or
            # crash.
            sys.stdout.flush()
            os._exit(130)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (for example `| head`); nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
