"""Fixtures shared by all tests: the device under test and the slow reference versions."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools")]
from scripted import tiny, toolbox  # noqa: E402, F401 - fixtures, found on the path above

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="device for component tests")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """With --doctest-modules, pytest would import every helper too, and with them Megatron."""
    return True if collection_path.suffix == ".py" and not collection_path.name.startswith("test_") else None


# Tests of real processes meet ports, kernels and schedulers that other programs share.
# One that fails is run once more, and the summary names it (R).
REAL_PROCESSES = (
    "components/engine/served",
    "components/engine/sglang",
    "components/engine/vllm",
    "components/learner/megatron",
    "components/sandbox",
    "pipeline/app/cluster",
    "pipeline/app/evaluate/test_eval_vllm.py",
    "pipeline/app/report/test_browser.py",
    "pipeline/run/distributed",
)
# Workers of pytest-xdist take groups in this order and then single tests, so that the longest do not come last.
LONGEST_FIRST = ("vllm servers", "megatron", "slurm", "vllm", "sglang")


def _place(item: pytest.Item) -> tuple[int, str]:
    """Key of the item's turn: named groups, other groups, single tests."""
    mark = item.get_closest_marker("xdist_group")
    if mark is None:
        return len(LONGEST_FIRST) + 1, ""
    group = mark.args[0]
    return (LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)), group


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent.as_posix()
    items.sort(key=_place)
    for item in items:
        if item.path.as_posix().removeprefix(here + "/").startswith(REAL_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device cuda: torch sees no CUDA device; run on a GPU machine or drop the option", returncode=2)
    return name


@pytest.fixture(scope="session")
def undocumented_metrics() -> Iterator[set[str]]:
    """Names that registered components have logged in this process without declaring them in `metrics`."""
    from pipeline.core.metric import definition
    from pipeline.core.registry import BUILTIN
    from pipeline.run.node_runner import NodeReport, NodeRunner

    found, harvest = set(), NodeRunner.harvest

    def watched(self: NodeRunner) -> NodeReport:
        if self.node.use in BUILTIN:
            names = (
                n for n in self.context.metrics if definition(self.node.cls.metrics_of(self.node.config), n) is None
            )
            found.update(f"{self.node.use}: {n}" for n in names)
        return harvest(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeRunner, "harvest", watched)
        yield found


@pytest.fixture(autouse=True)
def metrics_are_documented(undocumented_metrics: set[str]) -> Iterator[None]:
    """Every run of every test in this process logs documented names only."""
    yield
    names = sorted(undocumented_metrics)
    undocumented_metrics.clear()
    assert not names, f"declare it in the `metrics` of its class, then call tools/update_docs: {', '.join(names)}"


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """tests/reference.py: slow, obvious versions of the formulas."""
    path = Path(__file__).parent / "reference.py"
    spec = importlib.util.spec_from_file_location("creditgraph_test_reference", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
