"""The formats that `creditgraph import` reads, and their files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from creditgraph.adapters.imports.jsonl import Lines
from creditgraph.adapters.imports.row import Format
from creditgraph.adapters.imports.slime import Samples
from creditgraph.adapters.imports.traces import PrimeRL, Traces
from creditgraph.adapters.imports.trl import Completions
from creditgraph.adapters.imports.verl import Dump
from creditgraph.pipeline.core.errors import ConfigError

FORMATS: dict[str, Format] = {f.name: f for f in (Completions(), Dump(), PrimeRL(), Traces(), Samples(), Lines())}


def files_of(places: Sequence[Path], reader: Format) -> list[Path]:
    """The files, those of folders included, in the order of the numbers in their names."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            several = ([p for p in place.glob(pattern) if p.is_file()] for pattern in reader.patterns)
            inside = next((files for files in several if files), [])
            if not inside:
                raise ConfigError(f"{place}: has no {' or '.join(reader.patterns)}, the files of --from {reader.name}.")
            found += sorted(inside, key=_order)
        elif place.is_file():
            found.append(place)
        else:
            raise ConfigError(f"{place}: no such file or folder.")
    return found


def _order(file: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(file))]
