"""`creditgraph data`: lists data files, checks one, or previews the prompts of a recipe."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.app.report.page import visible
from pipeline.core.errors import ConfigError, CreditgraphError, did_you_mean
from pipeline.run.compose import build_experiment, compose, list_choices, read_yaml, search_dirs

if TYPE_CHECKING:
    from pipeline.app.data.check import DataCheck

MAX_CHARACTERS = 1500  # of a prompt
MAX_REFUSED = 5


def main(options: argparse.Namespace) -> int:
    """Runs one action. `check` returns 1 when an entry is not sound, 2 when it cannot be loaded."""
    if options.action == "list":
        return _list(list_choices("data", search_dirs(options.config_dir)))
    if options.action == "check":
        return _check_files(options)
    return _preview(options)


def _list(files: dict[str, Path]) -> int:
    for name, file in sorted(files.items()):
        first = file.read_text(encoding="utf-8", errors="replace").partition("\n")[0].removeprefix("# ")
        print(f"{name:20} {visible(first)}")
        for entry, settings in read_yaml(file).items():
            where = settings.get("path") or settings.get("name") or settings.get("source", "chains")
            names = settings.get("files") or []
            part = " ".join(
                str(p) for p in (settings.get("subset"), settings.get("split") if not names else "", *names) if p
            )
            print(f"{'':22} {entry:9} {visible(where)} {visible(part)}  {settings.get('verifier') or ''}".rstrip())
    return 0


def _check_files(options: argparse.Namespace) -> int:
    if options.rows < 0:
        raise ConfigError(f"expected --rows ≥ 0 (0: all), got {options.rows}.")
    known = list_choices("data", search_dirs(options.config_dir))
    unknown = [name for name in options.names if name not in known]
    if unknown:
        raise ConfigError(f"data check: no data file '{unknown[0]}'.{did_you_mean(unknown[0], known)}")
    if not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "0" if os.isatty(2) else "1"
    return max(_check(name, options) for name in options.names)


def _check(name: str, options: argparse.Namespace) -> int:
    from pipeline.app.data.check import check_entry

    entries: dict[str, dict[str, Any]] = compose([f"data={name}"], options.config_dir).get("data") or {}
    if options.entry:
        if options.entry not in entries:
            raise ConfigError(f"data check {name}: no entry '{options.entry}'.{did_you_mean(options.entry, entries)}")
        entries = {options.entry: entries[options.entry]}
    if options.path:
        if len(entries) > 1:
            raise ConfigError(
                f"--path: expected one entry of {name}, got {', '.join(entries)}. Add --entry {next(iter(entries))}."
            )
        entries = {entry: {**settings, "path": options.path} for entry, settings in entries.items()}
    worst = 0
    for entry, settings in entries.items():
        print(f"{name}.{entry}")
        try:
            check = check_entry(settings, f"data.{entry}", options.model, options.rows)
        except CreditgraphError as error:
            print(f"  FAILED     {visible(error)}")
            worst = 2
            continue
        _print_check(check, entry, options.rows)
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
    from pipeline.app.data.preview import print_preview

    if options.prompts < 1 or options.tokens < 0:
        raise ConfigError(f"expected --prompts ≥ 1 and --tokens ≥ 0, got {options.prompts} and {options.tokens}.")
    experiment = build_experiment(compose(options.overrides, options.config_dir), " ".join(options.overrides))
    print_preview(experiment, options.prompts, options.tokens)
    return 0
