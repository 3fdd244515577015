"""`creditgraph data`: checks a data file, or previews the prompts of a recipe."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from creditgraph.pipeline.app.arguments import add_config_dir
from creditgraph.pipeline.app.text import visible
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, did_you_mean
from creditgraph.pipeline.run.compose.choices import list_choices, search_dirs
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

if TYPE_CHECKING:
    from creditgraph.pipeline.app.data.check import DataCheck

MAX_CHARACTERS = 1500  # of a prompt
MAX_REFUSED = 5
_OPTIONS = {"check": ("entry", "path", "rows", "model", "verifier"), "preview": ("prompts", "tokens")}

SUMMARY = "Check a data file of the configuration, or preview the prompts of a recipe."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph data check gsm8k --entry eval --path copies/gsm8k_test.jsonl\n"
        "  creditgraph data check gsm8k --verifier my_package.module:Mine\n"
        "  creditgraph data preview recipe=srpo_qwen2_5_14b_instruct data.train.path=olympiads.jsonl"
    )
    parser.add_argument("action", choices=list(_OPTIONS))
    parser.add_argument(
        "arguments", nargs="*", metavar="NAME|key=value", help="check: files of configs/data; preview: settings"
    )
    add_config_dir(parser, "data/, recipe/ …")
    parser.add_argument("--entry", help="check: one entry of the file (train, eval …); default: all")
    parser.add_argument("--path", metavar="FILE", help="check: read this local copy instead of the hub; one entry")
    parser.add_argument("--rows", type=int, help="check: rows to check; 0 checks all (default: 2000)")
    parser.add_argument("--model", help="check: show prompts and count tokens with this model's tokenizer")
    parser.add_argument("--verifier", metavar="USE", help="check: this verifier instead of the one of the data file")
    parser.add_argument("--prompts", type=int, help="preview: prompts to show (default: 2)")
    parser.add_argument(
        "--tokens", type=int, help="preview: tokens to show of each, from both ends; 0 shows all (default: 400)"
    )


def main(options: argparse.Namespace) -> int:
    """Runs one action. `check` returns 1 if a verifier refuses a reference, 2 if an entry fails."""
    for action, names in _OPTIONS.items():
        other = [f"--{name}" for name in names if getattr(options, name) is not None]
        if other and action != options.action:
            raise ConfigError(f"data {options.action}: {', '.join(other)} is for data {action}; leave it out.")
    if options.action == "check":
        return _check_files(options)
    return _preview(options)


def _check_files(options: argparse.Namespace) -> int:
    rows = 2000 if options.rows is None else options.rows
    if not options.arguments or rows < 0:
        raise ConfigError(f"data check: expected NAME … and --rows ≥ 0 (0: all), got --rows {rows}.")
    check_names(options.arguments, options.config_dir)
    if not os.isatty(2):
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    return max(_check(name, rows, options) for name in options.arguments)


def check_names(names: Sequence[str], config_dirs: Sequence[str]) -> None:
    """Raises ConfigError for a name that is no file of configs/data."""
    known = list_choices("data", search_dirs(config_dirs))
    for name in names:
        if name not in known:
            raise ConfigError(f"data: no data file '{name}'.{did_you_mean(name, known)}")


def sections(name: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Entry → section of a data file, with --entry, --path and --verifier of the options."""
    entries: dict[str, dict[str, Any]] = compose([f"data={name}"], options.config_dir).get("data") or {}
    if options.entry:
        if options.entry not in entries:
            raise ConfigError(f"data {name}: no entry '{options.entry}'.{did_you_mean(options.entry, entries)}")
        entries = {options.entry: entries[options.entry]}
    if options.path:
        if len(entries) > 1:
            raise ConfigError(
                f"--path: expected one entry of {name}, got {', '.join(entries)}. Add --entry {next(iter(entries))}."
            )
        entries = {entry: {**settings, "path": options.path} for entry, settings in entries.items()}
    if options.verifier:
        entries = {entry: {**settings, "verifier": options.verifier} for entry, settings in entries.items()}
    return entries


def _check(name: str, rows: int, options: argparse.Namespace) -> int:
    from creditgraph.pipeline.app.data.check import check_entry

    worst = 0
    for entry, settings in sections(name, options).items():
        print(f"{name}.{entry}")
        try:
            check = check_entry(settings, f"data.{entry}", options.model, rows)
        except CreditgraphError as error:
            print(f"  FAILED     {visible(error)}")
            worst = 2
            continue
        _print_check(check, entry, rows)
        worst = max(worst, 1 if check.refused else 0)
    return worst


def _print_check(check: DataCheck, entry: str, max_rows: int) -> None:
    loaded = check.loaded
    counts = loaded.counts
    if loaded.source.source == "hub" and not loaded.source.path:
        pinned = loaded.revision and loaded.revision == loaded.source.revision
        step = "pinned" if pinned else f"not pinned; pin it with data.{entry}.revision={loaded.revision or 'COMMIT'}"
        print(f"  revision   {loaded.revision or 'unknown'} ({step})")
    for file in loaded.files:
        size = f" ({file['bytes']:,} bytes)" if "bytes" in file else ""
        print(f"  file       {visible(file['path'])}{size}")
    ended = f", the first {max_rows:,} looked at" if max_rows and counts.read >= max_rows else ""
    print(f"  rows       {counts.read:,} read{ended}, {counts.used:,} usable")
    for column, count in counts.filtered.most_common():
        print(f"  left out   {count:,} by keep.{visible(column)}")
    for reason, count in counts.rejected.most_common(10):
        print(f"  rejected   {count:,} × {visible(reason)}")
    if counts.duplicates:
        print(f"  duplicates {counts.duplicates:,}")
    if counts.not_chosen:
        print(f"  not chosen {counts.not_chosen:,} by shuffle, skip and size")
    print(f"  verifier   {check.verifier}")
    for row, answer, reason in check.refused[:MAX_REFUSED]:
        print(f"             row {row}: '{visible(answer[:60])}': {visible(reason[:120])}")
    print(f"  prompts    {counts.min_tokens:,} to {counts.max_tokens:,} {check.unit}")
    first = loaded.rows[0]
    note = f" (as {check.shown_as} text; --model NAME shows it through its chat template)" if check.shown_as else ""
    print(f"  first prompt{note}, answer '{visible(first.answer[:60])}'")
    text = first.text if len(first.text) <= MAX_CHARACTERS else first.text[:MAX_CHARACTERS] + " …"
    for line in text.splitlines():
        print(f"  | {visible(line)}")


def _preview(options: argparse.Namespace) -> int:
    from creditgraph.pipeline.app.data.preview import print_preview

    prompts = 2 if options.prompts is None else options.prompts
    tokens = 400 if options.tokens is None else options.tokens
    if prompts < 1 or tokens < 0:
        raise ConfigError(f"data preview: expected --prompts ≥ 1 and --tokens ≥ 0, got {prompts} and {tokens}.")
    experiment = build_experiment(compose(options.arguments, options.config_dir), " ".join(options.arguments))
    print_preview(experiment, prompts, tokens)
    return 0
