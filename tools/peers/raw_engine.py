"""Another engine's own offline generate, without anything of this project; started by tools/bench_engine.

Runs in the environment of that engine. Reads JSON lines: the first has the engine's options and end-of-text ids, each
later one a batch; responds to each with seconds and tokens, on a line that starts with MARK.
"""

import json
import os
import sys
import time
from collections.abc import Callable

MARK = "bench_engine "  # marks responses among the engine's own output

Generate = Callable[[dict], int]


def main() -> None:
    # Responses go where the parent reads them; whatever the engine prints goes to standard error.
    responses = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    generate = {"vllm": vllm, "sglang": sglang}[sys.argv[1]](first)
    responses.write(f"{MARK}{{}}\n")
    for text in sys.stdin:
        batch = json.loads(text)
        start = time.perf_counter()
        tokens = generate(batch)
        responses.write(MARK + json.dumps({"seconds": time.perf_counter() - start, "tokens": tokens}) + "\n")


def vllm(first: dict) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(**first["options"])
    fixed = {"logprobs": 0, "stop_token_ids": first["eos"], "ignore_eos": True, "detokenize": False}

    def generate(batch: dict) -> int:
        rows = batch["rows"]
        params = [
            SamplingParams(max_tokens=batch["max_tokens"], seed=batch["seed"] + n, **fixed) for n in range(len(rows))
        ]
        done = llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
        return sum(len(out.outputs[0].token_ids) for out in done)

    return generate


def sglang(first: dict) -> Generate:
    from sglang import Engine

    engine = Engine(**first["options"])

    def generate(batch: dict) -> int:
        rows = batch["rows"]
        params = [{"max_new_tokens": batch["max_tokens"], "sampling_seed": batch["seed"] + n} for n in range(len(rows))]
        done = engine.generate(input_ids=rows, sampling_params=params, return_logprob=True)
        return sum(len(out["output_ids"]) for out in done)

    return generate


if __name__ == "__main__":
    main()
