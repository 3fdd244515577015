"""The comparison of declared ranges in tools/resolve; that of pip needs the network."""

import importlib.util
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="module")
def resolve():
    loader = SourceFileLoader("resolve", str(ROOT / "tools" / "resolve"))
    spec = importlib.util.spec_from_loader("resolve", loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["resolve"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("mine", "theirs", "clash"),
    [
        ("torch>=2.6", "torch==2.9.0", ""),
        ("torch>=2.10", "torch==2.9.0", "torch: >=2.10 here, ==2.9.0 there"),
        ("transformers>=5.16.1,<5.20", "transformers<=5.8.0,>=5.6.1", "transformers: <5.20,>=5.16.1 here"),
        ("numpy>=1.26", "NumPy<2", ""),
        ("hydra-core>=1.3.2", "hydra_core", ""),
        ("hydra-core>=1.3.2", "omegaconf", ""),
    ],
)
def test_ranges_that_exclude_each_other(resolve, mine, theirs, clash):
    found = resolve.compare([mine], [theirs])
    assert bool(found) == bool(clash)
    assert clash in "".join(found)


def test_the_core_has_no_upper_bound(resolve):
    assert [text for text in resolve.wanted([]) if re.search("<|==|~=", text)] == []


def test_an_extra_brings_those_that_it_includes(resolve):
    included = {text for text in resolve.wanted(["train"]) if text.startswith("transformers")}
    assert included <= set(resolve.wanted(["lora"]))
