"""Versions of libraries that are refused before anything starts, and the ranges of pyproject.toml."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from creditgraph.pipeline.core import versions
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.versions import TESTED, check_tested

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "1.0"])
def test_an_untested_version_gets_a_sentence(monkeypatch, found):
    monkeypatch.setattr(versions, "version", lambda package: found)
    with pytest.raises(ConfigError) as raised:
        check_tested("engine.vllm", "vllm")
    assert str(raised.value) == (
        f"engine.vllm: expected vllm >=0.32, <0.34, whose insides it was compared with, got {found}. Install it with "
        "`pip install 'vllm>=0.32,<0.34'`."
    )


@pytest.mark.parametrize("found", ["0.32.0", "0.33.0", "0.33.1+cu130", "0.33.0rc1"])
def test_tested_versions_pass_and_so_does_a_missing_package(monkeypatch, found):
    monkeypatch.setattr(versions, "version", lambda package: found)
    check_tested("engine.vllm", "vllm")
    monkeypatch.undo()
    monkeypatch.setitem(TESTED, "no-such-package", "<0")
    check_tested("engine.vllm", "no-such-package")


def test_extras_have_the_tested_ranges():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = {r.name: r.specifier for extra in extras.values() for r in map(Requirement, extra)}
    for package, tested in TESTED.items():
        assert declared[package] == tested, package


def test_the_script_of_sglangs_own_environment_has_the_same_version():
    from creditgraph.components.engine.sglang.start import _TESTED

    assert SpecifierSet(TESTED["sglang"]).contains(_TESTED)
