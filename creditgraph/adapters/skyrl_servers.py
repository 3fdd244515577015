"""SkyRL's own workers, servers, environments and data, for graphs that ask the policy.

Workers score texts. Servers, which continue them, are awake where they have GPUs of their own.
"""

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import skyrl_gym
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.dataset import PromptDataset

from creditgraph.adapters.endpoint import EndpointPolicy
from creditgraph.adapters.estimator import Estimator
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rewards import HostRewards
from creditgraph.adapters.rows import reference_answers
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.payloads import Trajectories

Row = tuple[Sequence[Mapping[str, str]], str | None, Mapping[str, Any], str]
"""an entry of SkyRL's dataset: messages, the name of an environment, further columns, the id"""
ANSWERS = ("reward_spec", "reward_model")
"""columns of SkyRL's data that may have a "ground_truth" """
OWN = ("max_tokens", "temperature", "logprobs", "skip_special_tokens")
"""fields of requests that `EndpointPolicy` sets"""
AT_ONCE = 64
"""rows that each server is asked for at a time"""


def check(credit: CreditGraph, cfg: Any) -> None:
    """Raises ConfigError where SkyRL's settings leave a graph no servers to ask, or none that scores as it samples."""
    if isinstance(credit.policy, EndpointPolicy):
        credit.sampled_at(cfg.generator.sampling_params.temperature)
    if credit.samples and credit.policy is None and cfg.trainer.placement.colocate_all:
        raise ConfigError(
            f"graph '{credit.name}': it continues responses, but servers that share GPUs with the trainer sleep when "
            "advantages are computed. Set trainer.placement.colocate_all=false, or name a server that has its weights "
            "by --endpoint=URL."
        )


def attach(estimator: Estimator, trainer: Any, uids: Sequence[str]) -> list[Row] | None:
    """Gives a graph that asks the policy the trainer's workers or, where it continues responses, its servers.

    SkyRL's environments verify what is sampled, unless the settings choose others.

    Returns:
        of each row, in the order of `uids`, its entry in SkyRL's dataset; None of a dataset of another kind, whose ids
        are not places.
    """
    credit, cfg = estimator.credit, trainer.cfg
    if credit.policy is None and not credit.samples:
        from creditgraph.adapters.skyrl_workers import SkyRLPolicy

        estimator.temperature = cfg.generator.sampling_params.temperature
        credit.attach(SkyRLPolicy(trainer))
    if credit.policy is None:
        client, sampling = trainer.inference_engine_client, cfg.generator.sampling_params
        fields = get_sampling_params_for_backend(cfg.generator.inference_engine.backend, sampling)
        credit.attach(
            EndpointPolicy(
                f"{client.proxy_url}/v1",
                resolve_policy_model_name(cfg),
                sampling={name: value for name, value in fields.items() if name not in OWN},
                concurrency=AT_ONCE * len(client.server_urls),
            ),
            SkyRLRewards(credit, cfg) if credit.takes_rewards else None,
            temperature=sampling.temperature,
            max_tokens=sampling.max_generate_length,
        )
    rows = None
    if isinstance(trainer.train_dataset, PromptDataset):
        entries = {uid: trainer.train_dataset[int(uid)] for uid in dict.fromkeys(uids)}
        rows = [entries[uid] for uid in uids]
    if isinstance(credit.verifier, SkyRLRewards):
        if rows is None:
            raise ConfigError(
                f"graph '{credit.name}': SkyRL's environments read the prompt's entry in a PromptDataset, but the "
                f"trainer has a {type(trainer.train_dataset).__name__}. Name a verifier among the graph's settings, "
                "verifier.use=verifier.function for example."
            )
        credit.verifier.keep(uids, rows)
    return rows


def answers_of(rows: Sequence[Row] | None) -> list[str] | None:
    """Reference answers, as SkyRL's data has them; None without."""
    columns = ([row[2].get(name) for name in ANSWERS] for row in rows or ())
    found = (next((x.get("ground_truth") for x in row if isinstance(x, Mapping)), None) for row in columns)
    return reference_answers(found) or None


class SkyRLRewards(HostRewards):
    """The rewards of SkyRL's environments; its rows are entries in SkyRL's dataset."""

    def __init__(self, credit: CreditGraph, cfg: Any) -> None:
        super().__init__(credit)
        self.cfg = cfg

    def rewards(self, rows: Sequence[Row], trajectories: Trajectories) -> list[float]:
        """See `HostRewards.rewards`."""
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(self._reward, rows, self.texts(trajectories)))
        if not self.cfg.generator.zero_reward_on_non_stop:
            return found
        reasons = trajectories.finish_reason
        return [0.0 if reason == "length" else reward for reward, reason in zip(found, reasons, strict=True)]

    def _reward(self, row: Row, text: str) -> float:
        messages, name, columns, _ = copy.deepcopy(row)
        name = name or self.cfg.environment.env_class
        extras = {**columns, "max_turns": self.cfg.generator.max_turns}
        environment = skyrl_gym.make(name, env_config=getattr(self.cfg.environment.skyrl_gym, name, {}), extras=extras)
        environment.init(messages)
        step = environment.step(text)
        environment.close()
        if not step["done"]:
            raise ConfigError(
                f"graph '{self.credit.name}': it samples responses of one turn, but environment '{name}' of SkyRL goes "
                "on after it. Choose a graph of turns, or name a verifier among the graph's settings, "
                "verifier.use=verifier.function for example."
            )
        return float(step["reward"])
