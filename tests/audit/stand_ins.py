"""Functions with the signatures of other trainers, written from the formulas: what `docs/audit.md` imports."""

import sys
from types import ModuleType

import numpy as np
import torch


def clipped(ratio, advantages, low=0.2, high=0.2):
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def ratio_of(new, old):
    return (new - old).clamp(-20, 20).exp()


def centred(rewards, groups, usable, by_std):
    out = torch.zeros_like(rewards)
    for group in set(groups.tolist()):
        rows = torch.as_tensor(groups == group) & usable
        if rows.any():
            own = rewards[rows]
            scale = own.std(unbiased=False) + 1e-6 if by_std else 1.0
            out[rows] = (own - own.mean()) / scale
    return out


def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config=None,
):
    """verl: (advantages, returns), [N, T]; `index` is an array of group ids."""
    assert isinstance(index, np.ndarray)
    usable = response_mask.bool().any(-1)
    rewards = token_level_rewards.sum(-1)
    value = centred(rewards, index, usable, norm_adv_by_std_in_grpo) / (1 + epsilon)
    token = value[:, None] * response_mask
    return token, token


def compute_policy_loss(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c=None):
    """slime: (loss of each token, clipped); `ppo_kl` is log π_old − log π."""
    ratio = (-ppo_kl).clamp(-20, 20).exp()
    loss = clipped(ratio, advantages, eps_clip, eps_clip_high)
    return loss, (loss == 0).float()


class PolicyLoss(torch.nn.Module):
    """OpenRLHF: a module; its call gives (loss, clipped, KL)."""

    def __init__(self, clip_eps_low: float = 0.2, clip_eps_high: float = 0.2):
        super().__init__()
        self.low, self.high = clip_eps_low, clip_eps_high

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None):
        loss = clipped(ratio_of(log_probs, old_log_probs), advantages, self.low, self.high)
        mask = torch.ones_like(loss) if action_mask is None else action_mask
        return (loss * mask).sum() / mask.sum(), None, None


def calculate_baseline_and_std_per_prompt(prompts, rewards, valid_mask, leave_one_out_baseline=True):
    """NeMo-RL: (baseline, standard deviation) of each row, [N]; rows with the same prompt tokens are a group."""
    groups = prompts[:, 0]
    baseline, std = torch.zeros_like(rewards), torch.ones_like(rewards)
    for i in range(len(rewards)):
        rows = (groups == groups[i]) & valid_mask.bool()
        std[i] = rewards[rows].std(unbiased=False) if rows.any() else 1.0
        if leave_one_out_baseline:
            rows[i] = False
        baseline[i] = rewards[rows].mean() if rows.any() else rewards[i]
    return baseline, std


MODULES = {
    "verl.trainer.ppo.core_algos": (compute_grpo_outcome_advantage,),
    "slime.utils.ppo_utils": (compute_policy_loss,),
    "openrlhf.models.loss": (PolicyLoss,),
    "nemo_rl.algorithms.utils": (calculate_baseline_and_std_per_prompt,),
}


def install(monkeypatch):
    """Puts modules with these functions where the real ones are imported from."""
    for name, things in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for thing in things:
            setattr(sys.modules[name], thing.__name__, thing)
