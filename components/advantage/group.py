"""Group-normalised outcome advantage (GRPO, Dr.GRPO, SRPO, MaxRL)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import INVALID, decimal, minus, rewards_of_groups, signed
from creditgraph.components.rollouts.turn_rows import check_episode_rewards, episode_rows
from creditgraph.pipeline.core.component import Component, Count, same_rows
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Rewards, Trajectories, Turns, check_aligned

Normalize = Literal["std", "mean", "std_exact", "over_mean"]
EXACT_ZERO = 1e-8

GROUP_METRICS = (
    Metric("groups", "groups", "groups of trajectories whose rewards are compared"),
    Metric("group_size", "rows", "trajectories of a group, mean over groups; one alone has nothing to compare with"),
    Metric("zero_variance_share", "share", "groups that give no signal, all their rewards being equal or invalid"),
    Metric("reward_std", "reward", "standard deviation of the reward within a group, mean over groups"),
)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The credit of each token, row for row; most advantages return it."""

    credit: Annotated[Credit, same_rows("trajectories")]


@takes_lists
def group_sum(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of values [N] per group, float64 [G], and the group place of each row, int64 [N]; `group` [N] is any ids."""
    ids, place = torch.unique(group, return_inverse=True)
    # In float64, so that the order of rows does not change a float32 result.
    return values.new_zeros(len(ids), dtype=torch.float64).index_add_(0, place, values.double()), place


@takes_lists
def group_moments(
    reward: Tensor, group: Tensor, valid: Tensor, unbiased: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and number of the valid rewards of each row's group, each [N] (float64, float64, int64).

    A group without a valid reward has mean 0; a group of one has standard deviation 0, also the unbiased one.
    """
    # NaN · 0 is NaN, so invalid rewards are replaced by 0, not weighted by it.
    reward = torch.where(valid, reward.double(), 0.0)
    counts, place = group_sum(valid, group)
    mean = (group_sum(reward, group)[0] / counts.clamp(min=1))[place]
    squares = group_sum(torch.where(valid, reward - mean, 0.0) ** 2, group)[0]
    std = (squares / (counts - 1 if unbiased else counts).clamp(min=1)).sqrt()[place]
    return mean, std, counts[place].long()


@takes_lists
def group_advantage(
    reward: Tensor,
    group: Tensor | None = None,
    valid: Tensor | None = None,
    *,
    normalize: Normalize = "std",
    unbiased: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each trajectory against its group, float32 [N].

    std: (r − mean) / (std + eps) (2402.03300); mean: r − mean (2503.20783); std_exact: (r − mean) / std with population
    std and no eps, 0 where std < 1e-8 (2605.25507); over_mean: (r − mean) / mean, 0 where mean < 1e-8, for rewards of 0
    or more: the policy gradient of log p (2602.02710). Invalid rewards [N bool] get 0 and are left out of mean and std.
    A group with one valid reward gets 0 in every form. The order of rows has no influence.

    Args:
        reward: float [N], here as below a tensor or a list.
        group: int64 [N], rows with equal ids are compared; without it all are.
        valid: bool [N]; without it all are.
        normalize: the form.
        unbiased: divides by n − 1 in `std` (ignored by the others).
        eps: added to the standard deviation in `std`.
    """
    group = torch.zeros_like(reward, dtype=torch.int64) if group is None else group
    valid = torch.ones_like(reward, dtype=torch.bool) if valid is None else valid
    if not reward.shape == group.shape == valid.shape:
        raise ValueError(
            f"group_advantage: expected reward, group and valid of shape [N], got {tuple(reward.shape)}, "
            f"{tuple(group.shape)} and {tuple(valid.shape)}."
        )
    mean, std, _ = group_moments(reward, group, valid, unbiased=unbiased and normalize == "std")
    centred = torch.where(valid, reward.double() - mean, 0.0)
    if normalize == "std":
        centred = centred / (std + eps)
    elif normalize == "std_exact":
        centred = torch.where(std < EXACT_ZERO, 0.0, centred / std.clamp(min=EXACT_ZERO))
    elif normalize == "over_mean":
        centred = torch.where(mean < EXACT_ZERO, 0.0, centred / mean.clamp(min=EXACT_ZERO))
    return centred.float()


def group_explanation(
    reward: Tensor,
    group: Tensor,
    valid: Tensor,
    *,
    normalize: Normalize = "std",
    unbiased: bool = False,
    eps: float = 1e-6,
    name: str = "r",
    several: str = "rewards of its group",
) -> list[str]:
    """`group_advantage` of each row as a formula with its numbers, and the rewards of its group.

    Args:
        reward, group, valid, normalize, unbiased, eps: as there.
        name: symbol of the reward.
        several: heads the list of the group's rewards.
    """
    mean, std, count = group_moments(reward, group, valid, unbiased=unbiased and normalize == "std")
    result = group_advantage(reward, group, valid, normalize=normalize, unbiased=unbiased, eps=eps)
    lists = rewards_of_groups(reward, valid, group, several)
    texts = []
    for i in range(len(reward)):
        spread = float(std[i])
        difference = minus(float(reward[i]), float(mean[i]))
        if not valid[i]:
            numbers = INVALID
        elif normalize == "mean":
            numbers = f"{name} − mean = {difference} = {signed(float(result[i]))}"
        elif normalize == "std_exact" and spread < EXACT_ZERO:
            numbers = f"{name} − mean = {difference} = 0, not divided by the standard deviation, which is 0"
        elif normalize == "over_mean":
            numbers = f"({name} − mean)/mean = ({difference})/{decimal(float(mean[i]))} = {signed(float(result[i]))}"
        else:
            added = eps if normalize == "std" else 0.0
            below = decimal(spread + added) if spread > EXACT_ZERO else f"(0 + {decimal(added)})"
            numbers = f"({name} − mean)/std = ({difference})/{below} = {signed(float(result[i]))}"
        moments = f"mean {decimal(float(mean[i]))}, standard deviation {decimal(spread)} of {int(count[i])}"
        silent = "" if spread > EXACT_ZERO else "; without a difference there is no signal"
        texts.append(f"{numbers}\n{lists[i]}; {moments}{silent}")
    return texts


def zero_groups(advantage: Tensor, group: Tensor) -> Tensor:
    """bool [N]: True for rows whose whole group has advantage 0."""
    nonzero, place = group_sum(advantage != 0, group)
    return (nonzero == 0)[place]


def training_mask(response_tokens: Jagged, inherited: Tensor, mask_prefix: bool = True) -> Jagged:
    """Jagged bool over response tokens: False on the first `inherited` [N] tokens when `mask_prefix`."""
    if not mask_prefix:
        return response_tokens.with_values(torch.ones_like(response_tokens.values, dtype=torch.bool))
    return response_tokens.with_values(response_tokens.positions >= inherited[response_tokens.row_ids])


def trajectory_credit(
    trajectories: Trajectories, advantage: Tensor, mask: Jagged | None = None, **columns: Tensor
) -> Credit:
    """One advantage per trajectory [N] on each of its tokens; `columns` are further numbers per trajectory [N].

    Without `mask` all tokens but inherited ones are trained on; the others have none.
    """
    tokens = trajectories.response_tokens
    mask = training_mask(tokens, trajectories.inherited) if mask is None else mask
    spread = tokens.spread(advantage)
    return Credit(
        uid=trajectories.uid,
        advantage=spread.with_values(spread.values.where(mask.values, 0.0)),
        mask=mask,
        columns={name: tokens.spread(column) for name, column in columns.items()},
    )


class GroupAdvantage(Component):
    """Normalises each outcome reward within its group and credits every trained token with it, as in GRPO.

    An invalid reward gets zero credit and does not enter its group's statistics. A group whose advantages are all zero
    gives no gradient but counts in the loss denominator, unless `drop_zero_groups`. With `turns` the rewards are those
    of episodes: each counts once in its group, however many turns it has, and all its turns get its advantage.
    """

    paper = "2402.03300"
    metrics = GROUP_METRICS

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Normalisation and masks."""

        normalize: Normalize = "std"
        """std: (r − mean)/(std + eps), GRPO; mean: r − mean, Dr.GRPO; std_exact: population std without eps, SRPO;
        over_mean: (r − mean)/mean, MaxRL, whose largest value, of one correct response among N, is N − 1"""
        unbiased: bool = False
        """n − 1 instead of n in the variance of `std`"""
        eps: float = 1e-6
        """added to the standard deviation in `std`"""
        mask_prefix: bool = True
        """exclude inherited prefix tokens from the loss; false trains on them too"""
        drop_zero_groups: bool = False
        """exclude groups without signal from the loss denominator"""

    config: Config

    def run(
        self,
        *,
        trajectories: Trajectories,
        rewards: Annotated[Rewards, same_rows("trajectories")],
        turns: Annotated[Turns | None, same_rows("trajectories")] = None,
    ) -> Outputs:
        """Spreads each trajectory's, or episode's, advantage over its tokens."""
        check_aligned(trajectories, rewards)
        settings = self.config
        rows, place = compared_rows(trajectories, turns, rewards)
        compared = rewards.select(rows)
        group = trajectories.group[rows]
        advantage = group_advantage(compared.value, group, compared.valid, **self._form())
        silent = zero_groups(advantage, group)
        mask = training_mask(trajectories.response_tokens, trajectories.inherited, settings.mask_prefix)
        if settings.drop_zero_groups:
            mask = mask.with_values(mask.values & ~silent[place][mask.row_ids])
        self.context.log(**group_metrics(compared, group, silent))
        return Outputs(credit=trajectory_credit(trajectories, advantage[place], mask))

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """(r − mean)/std with its numbers, and the rewards of the group."""
        rows, place = compared_rows(inputs["trajectories"], inputs.get("turns"), inputs["rewards"])
        rewards: Rewards = inputs["rewards"].select(rows)
        texts = group_explanation(rewards.value, inputs["trajectories"].group[rows], rewards.valid, **self._form())
        return [texts[i] for i in place.tolist()]

    def _form(self) -> dict[str, Any]:
        settings = self.config
        return {"normalize": settings.normalize, "unbiased": settings.unbiased, "eps": settings.eps}


def compared_rows(trajectories: Trajectories, turns: Turns | None, rewards: Rewards) -> tuple[Tensor, Tensor]:
    """As `episode_rows`; without turns every row is an episode."""
    if turns is None:
        rows = torch.arange(len(trajectories))
        return rows, rows
    check_aligned(trajectories, turns)
    check_episode_rewards(rewards, turns)
    return episode_rows(turns)


def group_metrics(rewards: Rewards, group: Tensor, silent: Tensor) -> dict[str, float]:
    """Values of `GROUP_METRICS`; `silent` [N bool] are the rows of groups without signal."""
    ids, place = torch.unique(group, return_inverse=True)
    if not len(ids):
        return {"groups": Count(0), "group_size": 0.0, "zero_variance_share": 0.0, "reward_std": 0.0}
    # Any row can represent its group: both numbers are the same on all of its rows.
    first = torch.zeros(len(ids), dtype=torch.int64).scatter_(0, place, torch.arange(len(group)))
    _, std, _ = group_moments(rewards.value, group, rewards.valid)
    return {
        "groups": Count(len(ids)),
        "group_size": len(group) / len(ids),
        "zero_variance_share": float(silent[first].double().mean()),
        "reward_std": float(std[first].mean()),
    }
