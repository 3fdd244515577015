"""`creditgraph new`: the files of a method, an environment or a verifier of one's own, which run as they are."""

from __future__ import annotations

import argparse
import keyword
import sys
from pathlib import Path

from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.run_directory import writing

SUMMARY = "Write the files of a method, environment or verifier of your own: code, recipe and tests."
KINDS = ("method", "environment", "verifier")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "example:\n  creditgraph new method shaped     # writes shaped.py, test_shaped.py, configs/recipe/shaped.yaml"
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name", metavar="NAME", help="of the module and the recipe, such as shaped_reward")


def main(options: argparse.Namespace) -> int:
    """Writes the files into the current folder; prints what to do next."""
    name = options.name
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"{options.kind} {name}: expected a name of a Python module, such as shaped_reward.")
    if name in sys.stdlib_module_names or name == "creditgraph":
        raise ConfigError(f"{options.kind} {name}: a module of that name exists; choose another name.")
    files = texts(options.kind, name)
    if there := [str(path) for path in files if path.exists()]:
        raise ConfigError(f"{options.kind} {name}: {', '.join(there)} exists; nothing was written.")
    for path, text in files.items():
        with writing(path, "another folder"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    print(f"next:\n  creditgraph train recipe={name}\n  python -m pytest test_{name}.py     (pip install pytest)")
    return 0


def texts(kind: str, name: str) -> dict[Path, str]:
    """File, relative to the current folder → its content."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("creditgraph.pipeline.app", "starters")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    title = "".join(part.capitalize() for part in name.split("_"))
    places = {"py": f"{name}.py", "yaml": f"configs/recipe/{name}.yaml", "test": f"test_{name}.py"}
    sources = {"py": f"{kind}.py.jinja", "yaml": f"{kind}.yaml.jinja", "test": f"{kind}_test.py.jinja"}
    return {
        Path(place): environment.get_template(sources[part]).render(name=name, title=title)
        for part, place in places.items()
    }
