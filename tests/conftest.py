"""Fixtures shared by all tests: the device under test and the slow reference versions."""

import atexit
import gc
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools")]
from scripted import tiny, toolbox  # noqa: E402, F401 - fixtures, found on the path above

torch.set_num_threads(1)
# The list of runs that were made here is the tests' own.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="creditgraph-state-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="device for component tests")
    parser.addoption("--only-device", action="store_true", help="only tests that take the fixture `device`")


# Tests of real processes meet ports, kernels and schedulers that other programs share.
# One that fails is run once more, and the summary names it (R).
REAL_PROCESSES = (
    "components/engine/served",
    "components/engine/sglang",
    "components/engine/vllm",
    "components/learner/megatron",
    "components/sandbox",
    "pipeline/app/cluster",
    "lab/evaluate/test_eval_vllm.py",
    "pipeline/app/report/test_browser.py",
    "pipeline/run/distributed",
)
# Not of the fast tier (tools/test --fast) either: they start processes, compile the site, or train for seconds.
SLOW_FILES = (
    "adapters/test_endpoint.py",
    "adapters/test_values.py",
    "audit/test_bugs.py",
    "audit/test_command.py",
    "audit/test_critic.py",
    "audit/test_designs.py",
    "audit/test_ours.py",
    "audit/test_second_set.py",
    "components/advantage/teachers/test_teacher.py",
    "components/advantage/test_turn_bias.py",
    "components/environment/test_openenv.py",
    "components/environment/test_verifiers.py",
    "components/learner/hf/test_critic.py",
    "components/learner/hf/test_sharding.py",
    "components/sampler/test_carry",
    "components/sampler/test_environment.py",
    "components/test_with_model.py",
    "components/value/test_process_reward.py",
    "components/verifier/test_base.py",
    "components/verifier/test_macos.py",
    "components/verifier/test_master_keys.py",
    "components/verifier/test_math.py",
    "configs",
    "installed",
    "lab",
    "pipeline/app/report/test_browser",
    "pipeline/app/test_cli.py",
    "pipeline/app/test_completion.py",
    "pipeline/app/test_environment_check.py",
    "pipeline/app/test_export.py",
    "pipeline/app/test_full_size_recipes.py",
    "pipeline/app/test_new.py",
    "pipeline/app/test_notebook.py",
    "pipeline/app/test_overview.py",
    "pipeline/app/test_preview.py",
    "pipeline/app/test_settings_mistakes.py",
    "pipeline/app/test_signal_watch.py",
    "pipeline/app/test_trackers.py",
    "pipeline/app/test_trial.py",
    "pipeline/app/test_words.py",
    "pipeline/core/test_contract.py",
    "pipeline/core/test_errors.py",
    "pipeline/core/test_metric.py",
    "pipeline/run/test_kill_resume.py",
    "pipeline/run/test_remade.py",
    "pipeline/run/test_secrets.py",
    "test_toy_training.py",
    "tools",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that need not be imported: helpers, of which --doctest-modules would run Megatron's, and what is slow."""
    helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    left_out = config.option.markexpr == "not slow" and _within(collection_path, *REAL_PROCESSES, *SLOW_FILES)
    return True if helper or left_out else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names what fails when it does: a run that is cut short prints no summary."""
    if report.outcome in ("failed", "rerun") and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stderr.write(f"\n{report.outcome} {report.nodeid}\n")


# Workers of pytest-xdist take groups and files in this order and then the others, so that the longest do not come last.
LONGEST_FIRST = (
    "vllm servers",
    "megatron",
    "slurm",
    "vllm",
    "sglang",
    "site",
    "installed",
    "pipeline/run/distributed/test_processes.py",
    "pipeline/app/report/test_browser.py",
    "pipeline/app/test_cli.py",
    "components/engine/served/test_faults.py",
    "tools/test_gpu_acceptance.py",
)


def _within(path: Path, *starts: str) -> bool:
    """Whether a path below the folder of tests begins with one of these."""
    return path.as_posix().removeprefix(HERE.as_posix() + "/").startswith(starts)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which writes groups into names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--only-device"):
        others = [item for item in items if "device" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    groups = []
    for item in items:
        if _within(item.path, *REAL_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))
        if _within(item.path, *REAL_PROCESSES, *SLOW_FILES):
            item.add_marker(pytest.mark.slow)
        mark = item.get_closest_marker("xdist_group")
        if mark is None:
            # One worker runs the tests of a file, which share fixtures.
            mark = pytest.mark.xdist_group(item.path.as_posix().removeprefix(HERE.as_posix() + "/"))
            item.add_marker(mark)
        groups.append(mark.args[0])
    first = {group: place for place, group in enumerate(LONGEST_FIRST)}
    order = sorted(range(len(items)), key=lambda i: first.get(groups[i], len(first)))
    items[:] = [items[i] for i in order]


def pytest_collection_finish(session: pytest.Session) -> None:
    # pytest 9.2 and pytest-xdist 3.8 together ignore the groups without a word: every worker starts its own servers.
    if session.config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist does not group tests; install pytest>=8.4,<9.2 for --dist loadgroup")
    gc.freeze()  # thousands of tests and modules, which every collection would walk through


ENDED: list[pytest.Session] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.freeze()  # pytest collects garbage five times at the end
    ENDED.append(session)


@atexit.register
def _leave() -> None:
    # Python would collect what every test imported, which takes longer than many a test.
    if ENDED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(ENDED[0].exitstatus))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.config.getoption("--device")
    if name != "cuda":
        yield name
        return
    if not torch.cuda.is_available():
        pytest.exit("--device cuda: torch sees no CUDA device; run on a GPU machine or drop the option", returncode=2)
    from creditgraph.components.learner.hf import model

    with pytest.MonkeyPatch.context() as patch:
        # Most tests compare in float32, for which a GPU has no flash kernels; the refusal has a test of its own.
        patch.setattr(model, "check_fast", lambda reason, slow_attention: None)
        yield name


@pytest.fixture(scope="session")
def undocumented_metrics() -> Iterator[set[str]]:
    """Names that registered components have logged in this process without declaring them in `metrics`."""
    from creditgraph.pipeline.core.registry import BUILTIN
    from creditgraph.pipeline.run.node_runner import NodeReport, NodeRunner

    undeclared, harvest = set(), NodeRunner.harvest

    def watched(self: NodeRunner) -> NodeReport:
        if self.node.use in BUILTIN:
            known = self.node.cls.metrics_of(self.node.config)
            names = (n for n in self.context.metrics if not any(metric.fits(n) for metric in known))
            undeclared.update(f"{self.node.use}: {n}" for n in names)
        return harvest(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeRunner, "harvest", watched)
        yield undeclared


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
