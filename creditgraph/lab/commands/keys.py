"""`creditgraph keys`: searches for answers that a verifier accepts for references of different value."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from creditgraph.pipeline.app.arguments import add_config_dir
from creditgraph.pipeline.app.text import visible
from creditgraph.pipeline.core.errors import ConfigError

if TYPE_CHECKING:
    from creditgraph.lab.master_keys import Search

MAX_KEY = 120  # characters of a master key
REFERENCES = 300  # of a search

SUMMARY = "Search for answers that a verifier accepts for references of different value."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n  creditgraph keys gsm8k --seconds 60\n  creditgraph keys gsm8k --verifier my_package.module:Mine"
    )
    parser.add_argument("arguments", nargs="+", metavar="NAME", help="files of configs/data")
    add_config_dir(parser, "data/")
    parser.add_argument("--entry", help="one entry of the file (train, eval …); default: all")
    parser.add_argument("--path", metavar="FILE", help="read this local copy instead of the hub; one entry")
    parser.add_argument("--verifier", metavar="USE", help="this verifier instead of the one of the data file")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of each search (default: 60)")


def main(options: argparse.Namespace) -> int:
    """Searches each entry; returns 1 if a verifier has a master key."""
    from creditgraph.components.verifier.base import Item
    from creditgraph.lab.master_keys import search_master_keys
    from creditgraph.pipeline.app.commands.data import check_names, sections
    from creditgraph.pipeline.app.data.check import check_entry, started

    if not 0 < options.seconds <= 3600:
        raise ConfigError(f"keys: expected 0 < --seconds ≤ 3600, got {options.seconds:g}.")
    check_names(options.arguments, options.config_dir)
    keys = 0
    for name in options.arguments:
        for entry, settings in sections(name, options).items():
            place = f"data.{entry}"
            if not settings.get("verifier"):
                raise ConfigError(f"{place}: it names no verifier; add --verifier USE.")
            check = check_entry(settings, place, None, 2000)
            rows = check.loaded.rows
            chosen = [rows[i] for i in range(0, len(rows), max(1, len(rows) // REFERENCES))][:REFERENCES]
            references = [Item(text="", answer=row.answer, metadata=row.metadata) for row in chosen]
            with started(str(settings["verifier"]), check.context) as component:
                search = search_master_keys(component.verdicts, references, options.seconds)
            print(f"{name}.{entry}")
            _print(search)
            keys += len(search.keys)
    return 1 if keys else 0


def _print(search: Search) -> None:
    ended = "" if search.complete else ", ended by the time or the number of keys"
    found = f"{len(search.keys)} master keys" if search.keys else "no master key"
    print(
        f"  search     {found}: {search.answers:,} odd answers, {search.graded:,} verdicts in "
        f"{search.seconds:.0f} s{ended}"
    )
    for key in search.keys:
        references = ", ".join(f"'{visible(reference[:30])}'" for reference in key.references)
        print(f"             right for {references}: {visible(key.response[:MAX_KEY]).replace(chr(10), ' ')}")
