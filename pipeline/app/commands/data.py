"""`creditgraph data`: what data files there are, and whether one loads and is what it says."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from pipeline.app.report.text import visible
from pipeline.core.errors import ConfigError, CreditgraphError, did_you_mean
from pipeline.run.compose import compose, list_choices, read_yaml, search_dirs

# Named by text: pipeline/ imports nothing of components/.
CHECK = "pipeline.app.data.check"
SHOWN = 1500  # characters of a prompt
REFUSED = 5


def main(options: argparse.Namespace) -> int:
    """Lists, or checks each entry of each named file; 1 when an entry is not sound, 2 when it cannot be loaded."""
    dirs = search_dirs(options.config_dir)
    known = list_choices("data", dirs)
    if options.action == "list":
        if options.names:
            raise ConfigError(
                f"data list {options.names[0]}: takes no name. Did you mean: creditgraph data check {options.names[0]}?"
            )
        return _list(known)
    if not options.names:
        raise ConfigError(
            "data check: no NAME; wanted a data file, for example creditgraph data check gsm8k (data list shows all)."
        )
    if options.rows < 0:
        raise ConfigError(f"--rows {options.rows}: wanted 0 (all) or more.")
    unknown = [name for name in options.names if name not in known]
    if unknown:
        raise ConfigError(f"data check: no data file '{unknown[0]}'.{did_you_mean(unknown[0], known)}")
    return max(_check(name, options) for name in options.names)


def sections(name: str, config_dirs: list[str]) -> dict[str, dict[str, Any]]:
    """The entries of a data file."""
    found: dict[str, dict[str, Any]] = compose([f"data={name}"], config_dirs).get("data") or {}
    return found


def _list(known: dict[str, Path]) -> int:
    for name, file in sorted(known.items()):
        first = file.read_text(encoding="utf-8", errors="replace").partition("\n")[0].removeprefix("# ")
        print(f"{name:20} {visible(first)}")
        for entry, settings in read_yaml(file).items():
            where = settings.get("path") or settings.get("name") or settings.get("source", "chains")
            files = settings.get("files") or []
            part = " ".join(
                str(p) for p in (settings.get("subset"), settings.get("split") if not files else "", *files) if p
            )
            print(f"{'':22} {entry:9} {visible(where)} {visible(part)}  {settings.get('verifier') or ''}".rstrip())
    return 0


def _check(name: str, options: argparse.Namespace) -> int:
    entries = sections(name, options.config_dir)
    if options.entry:
        if options.entry not in entries:
            raise ConfigError(f"data check {name}: no entry '{options.entry}'.{did_you_mean(options.entry, entries)}")
        entries = {options.entry: entries[options.entry]}
    if options.path:
        if len(entries) > 1:
            known = ", ".join(entries)
            raise ConfigError(
                f"--path: {name} has the entries {known}; wanted one of them. Add --entry {next(iter(entries))}."
            )
        entries = {entry: {**settings, "path": options.path} for entry, settings in entries.items()}
    check: Any = importlib.import_module(CHECK).check_entry
    if not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "0" if os.isatty(2) else "1"
    worst = 0
    for entry, settings in entries.items():
        print(f"{name}.{entry}")
        try:
            checked = check(settings, f"data.{entry}", options.model, options.rows)
        except CreditgraphError as error:
            print(f"  FAILED     {visible(error)}")
            worst = 2
            continue
        worst = max(worst, _print(checked, entry, settings, options.rows))
    return worst


def _print(checked: Any, entry: str, settings: dict[str, Any], most: int) -> int:
    loaded, counts = checked.loaded, checked.loaded.counts
    if settings.get("source") == "hub" and not settings.get("path"):
        pinned = loaded.revision and loaded.revision == settings.get("revision")
        step = "pinned" if pinned else f"not pinned; pin it with data.{entry}.revision={loaded.revision or 'COMMIT'}"
        print(f"  revision   {loaded.revision or 'unknown'} ({step})")
    for file in loaded.files:
        size = f" ({file['bytes']:,} bytes)" if "bytes" in file else ""
        print(f"  file       {visible(file['path'])}{size}")
    ended = f", the first {most:,} looked at" if most and counts.read >= most else ""
    print(f"  rows       {counts.read:,} read{ended}, {counts.used:,} usable")
    for column, count in counts.filtered.most_common():
        print(f"  left out   {count:,} by keep.{visible(column)}")
    for reason, count in counts.rejected.most_common(10):
        print(f"  rejected   {count:,} × {visible(reason)}")
    if counts.duplicates:
        print(f"  duplicates {counts.duplicates:,}")
    print(f"  verifier   {checked.verdict}")
    for row, answer, reason in checked.refused[:REFUSED]:
        print(f"             row {row}: '{visible(answer[:60])}': {visible(reason[:120])}")
    first = loaded.rows[0]
    print(f"  prompts    {counts.tokens[0]:,} to {counts.tokens[1]:,} {checked.unit}")
    note = f" (as {checked.shown_as} text; --model NAME shows it through its chat template)" if checked.shown_as else ""
    print(f"  first prompt{note}, answer '{visible(first.answer[:60])}'")
    text = first.text if len(first.text) <= SHOWN else first.text[:SHOWN] + " …"
    for line in text.splitlines():
        print(f"  | {visible(line)}")
    return 1 if checked.refused else 0
