"""Names of components: built in, external, and from other packages."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from creditgraph.pipeline.core import registry
from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import ConfigError, MissingExtraError
from creditgraph.pipeline.core.registry import BUILTIN, known_components, load_class, target_of


@pytest.fixture
def other_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another distribution that registers one new name and one that is taken."""

    def entries(group: str) -> list[EntryPoint]:
        assert group == "creditgraph.components"
        return [
            EntryPoint("advantage.mine", "graph_toys:Advantage", group),
            EntryPoint("buffer.merge", "graph_toys:Merge", group),
        ]

    monkeypatch.setattr(registry, "entry_points", entries)
    known_components.cache_clear()
    yield
    known_components.cache_clear()


def test_names_resolve() -> None:
    assert target_of("advantage.group") == BUILTIN["advantage.group"]
    assert target_of("my_package.credit:Mine") == "my_package.credit:Mine"
    assert load_class("graph_toys:Sampler").__name__ == "Sampler"


@pytest.mark.parametrize("use", sorted(BUILTIN))
def test_every_built_in_name_loads_a_component(use: str) -> None:
    assert issubclass(load_class(use), Component)


@pytest.mark.usefixtures("other_package")
def test_entry_points_add_names_but_take_none_over() -> None:
    assert load_class("advantage.mine").__module__ == "graph_toys"
    assert target_of("buffer.merge") == BUILTIN["buffer.merge"]


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            "buffer.merg",
            "unknown component 'buffer.merg'; expected a registered name, 'package.module:Class' or "
            "'path/to/file.py:Class'. Did you mean 'buffer.merge'?",
        ),
        (
            "zzz",
            "unknown component 'zzz'; expected a registered name, 'package.module:Class' or 'path/to/file.py:Class'. "
            "Known: advantage.",
        ),
        (
            "components.advantage.group:GroupAdvantage",
            "component 'components.advantage.group:GroupAdvantage' is now "
            "'creditgraph.components.advantage.group:GroupAdvantage'; write that.",
        ),
        ("pipeline.core.component:Component", "component 'pipeline.core.component:Component' is now 'creditgraph.pi"),
        ("components.mine:C", "component 'components.mine:C': module 'components"),
        ("no/such/ideas.py:C", "class 'no/such/ideas.py:C': "),
        ("a b:C", "unknown component 'a b:C'"),
        ("graph_toys:", "unknown component 'graph_toys:'"),
        (
            "missing_pkg.x:C",
            "component 'missing_pkg.x:C': module 'missing_pkg' cannot be imported; install it or correct "
            "'missing_pkg.x'.",
        ),
        ("graph_toys:Merg", "component 'graph_toys:Merg': no class 'Merg' in graph_toys. Did you mean 'Merge'?"),
        (
            "creditgraph.pipeline.core.graph:RESERVED_NAMES",
            "component 'creditgraph.pipeline.core.graph:RESERVED_NAMES': "
            "creditgraph.pipeline.core.graph:RESERVED_NAMES is not a class.",
        ),
    ],
)
def test_texts(use: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_class(use)
    assert str(caught.value).startswith(text)


def test_a_missing_dependency_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MissingExtraError, match=r"No module named 'vllm'.*pip install 'creditgraph\[vllm\]'"):
        load_class("graph_toys:Sampler")


def test_a_class_of_a_file(tmp_path) -> None:
    """Every mention of it is the same class."""
    (tmp_path / "notions.py").write_text(
        "from creditgraph.components.advantage.group import GroupAdvantage\n\n\nclass Mine(GroupAdvantage):\n"
        '    """Group advantage."""\n\n\nx = 1\n'
    )
    mine = load_class(f"{tmp_path}/notions.py:Mine")
    assert issubclass(mine, Component)
    assert load_class(f"{tmp_path}/notions.py:Mine") is mine
    with pytest.raises(ConfigError, match="Did you mean 'Mine'"):
        load_class(f"{tmp_path}/notions.py:Mane")
    with pytest.raises(ConfigError, match="is not a class"):
        load_class(f"{tmp_path}/notions.py:x")


def test_listing_imports_nothing() -> None:
    code = "import sys; from creditgraph.pipeline.core import registry; registry.known_components();"
    code += "print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
