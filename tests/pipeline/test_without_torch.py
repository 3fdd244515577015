"""Checks with a stand-in for torch say what checks with torch say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch  # noqa: F401

from pipeline.compose import CONFIG_DIR, list_choices, read_yaml
from pipeline.graph import build_graph
from pipeline.without_torch import without_torch

ROOT = Path(__file__).resolve().parent.parent.parent


def described(graph):
    """What a check and a job script read of a graph."""
    return [
        [n.name, n.use, n.placement, repr(n.config), {s: [str(w) for w in ws] for s, ws in n.wires.items()}]
        + [{s: (o.type_text, o.is_list, o.required) for s, o in side.items()} for side in (n.sockets.inputs, n.sockets.outputs)]
        + [getattr(n.cls, "ranks_per_replica", lambda c: 1)(n.config), graph.lanes()[n.name], graph.overlaps]
        for n in graph.nodes
    ]


def all_graphs():
    return json.dumps({name: described(build_graph(read_yaml(file))) for name, file in list_choices("graph", [CONFIG_DIR]).items()})


def alone(program, *arguments, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *(["-c", program] if program else []), *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_every_shipped_graph_is_the_same_without_torch():
    program = """
import importlib.util, sys
from pipeline.without_torch import without_torch
def failed():
    raise SystemExit("fell back")
with without_torch(failed) as active:
    assert active
    spec = importlib.util.spec_from_file_location("this_test", sys.argv[1])
    this_test = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(this_test)
    sys.stdout.write(this_test.all_graphs())
assert type(sys.modules["torch"]).__name__ == "_Module"
"""
    done = alone(program, __file__)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(all_graphs())


def test_stand_ins_serve_annotations_bases_decorators_and_tables(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nimport torch.nn.functional as F\nfrom torch import Tensor, nn\n"
        "from torch.autograd.function import once_differentiable\n"
        "BITS = {torch.float32: 32, torch.bfloat16: 16}\nEither = Tensor | None\n"
        "class Own(torch.autograd.Function):\n    @staticmethod\n    @once_differentiable\n    def backward(ctx): return 7\n"
        "class Layer(nn.Module):\n    @torch.no_grad()\n    def forward(self, x: Tensor): return 8\n"
    )
    program = """
import types
from pipeline.without_torch import without_torch
with without_torch():
    import mine
assert isinstance(mine.Layer.__dict__["forward"], types.FunctionType)
assert mine.Own.backward(None) == 7
assert len(mine.BITS) == 2
"""
    done = alone(program, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stderr


def test_what_needs_more_than_a_stand_in_starts_again_with_torch(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\nNEW = torch.cuda.is_available() or torch.float32.itemsize * 8 == 32\n")
    (tmp_path / "program.py").write_text(
        "from pipeline.without_torch import without_torch\nwith without_torch() as active:\n    import mine\nprint(active, mine.NEW)\n"
    )
    done = alone("", str(tmp_path / "program.py"), PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr


def test_a_process_that_has_torch_keeps_it():
    with without_torch() as active:
        assert not active


def test_a_mistake_is_told_in_the_words_of_a_full_check(tmp_path):
    mistake = ["-m", "pipeline.cli", "submit", "recipe=toy_grpo", "sampler.grup_size=3", f"run.root={tmp_path}", "--dry-run"]
    done = alone("", *mistake)
    assert done.returncode == 2
    assert "sampler.grup_size: unknown setting. Did you mean 'group_size'?" in done.stderr
    assert done.stderr.count("creditgraph submit:") == 1


def test_a_rendered_job_needs_no_torch(tmp_path):
    program = f"""
import sys
sys.argv = ["creditgraph", "submit", "recipe=toy_srpo", "cluster=one_node", "cluster.nodes=128", "run.root={tmp_path}", "--dry-run"]
from pipeline.cli import main
assert main() == 0
assert type(sys.modules["torch"]).__name__ == "_Module"
"""
    done = alone(program)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=128" in done.stdout
