"""Run by .venv-sglang's Python: checks request bodies (JSON on standard input) with SGLang's own request classes.

Writes, as JSON into the given file, what is wrong with each body ("" for nothing), and GPU hashes of some bytes by
SGLang's kernel.
"""

import json
import os
import sys
from types import SimpleNamespace


def problem_of(path, body):
    import pydantic
    from sglang.srt.entrypoints.api_contract import generate_contract_error
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams

    kinds = {
        "/generate": io_struct.GenerateReqInput,
        "/update_weights_from_disk": io_struct.UpdateWeightFromDiskReqInput,
        "/update_weights_from_distributed": io_struct.UpdateWeightsFromDistributedReqInput,
        "/init_weights_update_group": io_struct.InitWeightsUpdateGroupReqInput,
        "/destroy_weights_update_group": io_struct.DestroyWeightsUpdateGroupReqInput,
        "/update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput,
        "/release_memory_occupation": io_struct.ReleaseMemoryOccupationReqInput,
        "/resume_memory_occupation": io_struct.ResumeMemoryOccupationReqInput,
        "/begin_weight_update": io_struct.BeginWeightUpdateReqInput,
        "/end_weight_update": io_struct.EndWeightUpdateReqInput,
        "/pause_generation": io_struct.PauseGenerationReqInput,
        "/continue_generation": io_struct.ContinueGenerationReqInput,
        "/abort_request": io_struct.AbortReq,
        "/weights_checker": io_struct.CheckWeightsReqInput,
    }
    kind = kinds[path]
    # SGLang takes unknown fields silently: a misspelt one would be without effect.
    unknown = set(body) - fields_of(kind)
    if unknown:
        return f"unknown fields {sorted(unknown)}"
    try:
        pydantic.TypeAdapter(kind).validate_python(body)
    except pydantic.ValidationError as error:
        return str(error)
    if path != "/generate":
        return ""
    unknown = set(body["sampling_params"]) - fields_of(SamplingParams)
    if unknown:
        return f"unknown sampling parameters {sorted(unknown)}"
    refused = generate_contract_error(body)
    if refused:
        return refused
    try:
        params = SamplingParams(**body["sampling_params"])
        params.normalize(SimpleNamespace(encode=lambda text, **_: [0] * len(text)))
        params.verify(64)
    except ValueError as error:
        return str(error)
    return ""


def fields_of(kind):
    import dataclasses

    if dataclasses.is_dataclass(kind):
        return {f.name for f in dataclasses.fields(kind)}
    return set(kind.__struct_fields__)


def parsed(arguments):
    """What SGLang's parser makes of a command line; its error for one that it refuses."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise ValueError(message)

    parser = Parser()
    ServerArgs.add_cli_args(parser)
    try:
        return {name: value for name, value in vars(parser.parse_args(arguments)).items() if is_json(value)}
    except ValueError as error:
        return str(error)


def is_json(value):
    return value is None or isinstance(value, (bool, int, float, str))


def opened(text):
    """Named tensors as SGLang opens them."""
    from sglang.srt.utils.common import MultiprocessingSerializer

    return [[name, t.float().flatten().tolist()] for name, t in MultiprocessingSerializer.deserialize(text)]


def gpu_hash(values):
    """`gpu_tensor_hash` with its kernel interpreted and its last sum written out."""
    import sglang.kernels.ops.memory.gpu_tensor_hash as kernels
    import torch

    words = torch.tensor(values, dtype=torch.int32)
    tiles = -(-len(words) // 8192)
    out = torch.empty(tiles, dtype=torch.int64)
    seed = 0x243F6A88
    kernels.hash_tiles32_kernel_blocked[(tiles,)](
        words, out, len(words), seed1=seed, seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=kernels.FMIX32_C1, FM_C2=kernels.FMIX32_C2, POS_A=kernels.POS_C1, POS_B=kernels.POS_C2,
        TILE=8192, BLOCK=256, USE_CG=False,
    )  # fmt: skip
    mask = (1 << 64) - 1
    return kernels._final_splitmix64(sum(value & mask for value in out.tolist()) & mask)


def main():
    os.environ["TRITON_INTERPRET"] = "1"  # runs the hash kernel without a GPU
    inputs = json.load(sys.stdin)
    answer = {
        "problems": [problem_of(path, body) for path, body in inputs["bodies"]],
        "hashes": [f"{gpu_hash(values):016x}" for values in inputs["hashes"]],
        "launches": [parsed(arguments) for arguments in inputs["launches"]],
        "opened": opened(inputs["pickled"]),
    }
    with open(inputs["answer"], "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
