"""Settings of engines in servers."""

import dataclasses
import typing

import pytest

from creditgraph.components.engine.served.settings import PoolSettings
from creditgraph.components.engine.sglang.engine import SGLangEngine
from creditgraph.components.engine.vllm.engine import VllmEngine


def places(settings, prefix=""):
    """Names of settings with the metadata "place", which covers everything below them."""
    types = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if field.metadata.get("place"):
            yield prefix + field.name
        elif dataclasses.is_dataclass(types[field.name]):
            yield from places(types[field.name], f"{prefix}{field.name}.")


@pytest.mark.parametrize("engine", [VllmEngine, SGLangEngine])
def test_settings_that_may_change_when_a_run_continues(engine):
    where = {"servers", "addresses", "key_file", "rendezvous", "pool", "sleep"}
    how = {"channel.kind", "channel.path", "channel.bucket_mb"}
    assert set(places(engine.Config)) == where | how


def test_pool_settings_are_checked():
    for wrong, problem in (
        ({"hang_seconds": 0}, "hang_seconds: expected more than 0, got 0"),
        ({"retries": -1}, "retries: expected at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=problem):
            PoolSettings(**wrong)


def test_server_settings_are_checked():
    for wrong, problem in (
        ({"return_routed_experts": True, "model": "m"}, "return_routed_experts: expected an engine of the learner's"),
        ({"servers": -1}, "servers: expected at least 0, got -1"),
        ({"stream_tokens": 0}, "stream_tokens: expected at least 1, got 0"),
        ({"kv_cache_gb": -1.0}, r"kv_cache_gb: expected at least 0, got -1\.0"),
        ({"gpu_memory": 1.5}, r"gpu_memory: expected 0 < gpu_memory ≤ 1, got 1\.5"),
    ):
        with pytest.raises(ValueError, match=problem):
            VllmEngine.Config(**wrong)
