"""Has verl's own trainers write their dumps of a small batch; runs in the environment .venv-verl.

    python dump_verl.py BATCH.json FOLDER PATCH.py …

FOLDER/v1 and FOLDER/legacy have the dumps as verl writes them, FOLDER/v1_patched and FOLDER/legacy_patched those after
the patches, which are the code of docs/trainers.md. The batch stands for TransferQueue, which holds it in a run.
"""

import json
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch

queue = sys.modules["transfer_queue"] = MagicMock()  # verl's extra verl-core installs it

from verl import DataProto  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import PPOTrainer  # noqa: E402


class Now:
    """Runs at once."""

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


class Words:
    """A tokenizer whose texts are the ids; 0 is padding."""

    pad_token_id = 0

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(int(i)) for i in ids if int(i))

    def batch_decode(self, rows, skip_special_tokens):
        return [self.decode(row, skip_special_tokens) for row in rows]


def trainer(cls, folder):
    concrete = type(cls.__name__, (cls,), {})
    concrete.__abstractmethods__ = frozenset()
    made = object.__new__(concrete)
    made.tokenizer, made.global_steps = Words(), 3
    made.config = SimpleNamespace(trainer={"rollout_data_dir": str(folder)})
    made._dump_executor, made._dump_futures = Now(), []
    return made


def nested(rows, dtype=torch.float64):
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def v1(batch, folder):
    keys = batch["keys"]

    def get(keys, partition_id, select_fields):
        assert partition_id == "train"
        at = [batch["keys"].index(key) for key in keys]
        values = {}
        for name in select_fields:
            rows = [batch[name][i] for i in at]
            if name in ("uid", "reward_model"):
                values[name] = np.array(rows, dtype=object)
            else:
                values[name] = nested(
                    rows, torch.int64 if name in ("prompts", "responses", "response_mask") else torch.float64
                )
        return values

    queue.kv_batch_get = get
    trainer(PPOTrainer, folder)._log_rollout_data(SimpleNamespace(keys=keys, partition_id="train"), {}, str(folder))


def legacy(batch, folder):
    def padded(rows, left=False):
        width = max(map(len, rows))
        return torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows])

    tensors = {
        name: padded(batch[name])
        for name in ("responses", "response_mask", "advantages", "old_log_probs", "rollout_log_probs")
    }
    tensors["prompts"] = padded(batch["prompts"], left=True)
    tensors["token_level_scores"] = padded(batch["rm_scores"])
    tensors["attention_mask"] = torch.cat([(tensors[n] != 0).long() for n in ("prompts", "responses")], dim=1)
    other = {
        "uid": np.array([k.split("_")[0] for k in batch["keys"]], dtype=object),
        "reward_model": np.array(batch["reward_model"], dtype=object),
    }
    data = DataProto.from_dict(tensors=tensors, non_tensors=other)
    trainer(RayPPOTrainer, folder)._log_rollout_data(data, {"acc": [1.0] * len(data)}, {}, str(folder))


def main():
    batch, folder, *patches = sys.argv[1:]
    batch, folder = json.loads(Path(batch).read_text()), Path(folder)
    v1(batch, folder / "v1")
    legacy(batch, folder / "legacy")
    for patch in patches:
        exec(compile(Path(patch).read_text(), patch, "exec"), {})
    v1(batch, folder / "v1_patched")
    legacy(batch, folder / "legacy_patched")


if __name__ == "__main__":
    main()
