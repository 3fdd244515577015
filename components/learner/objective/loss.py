"""The loss of a learner: an objective's terms, optional terms for any objective, and their aggregation.

Aggregation does not depend on how the batch was cut. With trained-token mask m, T_i = Σ_t m_{i,t}, B rows:

    token_mean            Σ_{i,t} m x / Σ m                (DAPO, 2503.14476)
    seq_mean_token_mean   (1/B) Σ_i (1/T_i) Σ_t m x        (GRPO, GSPO, SRPO)
    seq_mean_token_sum    (1/B) Σ_i Σ_t m x
    constant              Σ_{i,t} m x / (B · L_max)        (Dr.GRPO, 2503.20783)

Σ m and B are of the whole training batch of one optimiser step: all micro-batches of all replicas. They are counted
here from numbers per row, which every rank has. A row with T_i = 0 adds nothing to the numerator and counts in B.
"""

import torch
from torch import Tensor

from creditgraph.components.learner.objective import entropy_mask, importance
from creditgraph.components.learner.objective.base import LossInputs
from creditgraph.components.learner.objective.kl import kl_estimate
from creditgraph.components.learner.objective.meters import AllSum, Meters
from creditgraph.components.learner.objective.settings import ObjectiveSettings, load_objective
from creditgraph.pipeline.core.component import identity_sum
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.streams import Stream

KL_WEIGHT = "kl_weight"
"""column of the credit: factor on the KL coefficient per token (SCoRe uses a larger one for first attempts)"""
IMITATION = "imitation"
"""column of the credit: weight of −log π_θ per token, added to the loss (VAPO's language-model loss of correct rows)"""
_UNSEEDED = Stream("entropy_mask")  # outside a run


@torch.no_grad()
def prepare(
    inputs: LossInputs,
    settings: ObjectiveSettings,
    meters: Meters,
    all_sum: AllSum = identity_sum,
    stream: Stream = _UNSEEDED,
) -> LossInputs:
    """Adds the columns of importance weights and entropy mask, then those of the objective; may change the mask.

    Args:
        inputs: the rows that this replica made.
        settings: settings of the loss.
        meters: collects metrics of these rows.
        all_sum: sums a tensor over replicas.
        stream: random numbers of this iteration, for an entropy mask that keeps tokens at random.
    """
    inputs = importance.correct(inputs, settings.importance, meters)
    return settings.build().prepare(entropy_mask.add_columns(inputs, settings.entropy_mask, all_sum, stream), all_sum)


def credited(inputs: LossInputs, settings: ObjectiveSettings) -> Tensor:
    """bool [rows]: whether the credit of a row gives it a gradient."""
    acts = inputs.mask.values
    if load_objective(settings.use).needs_credit:
        nonzero = inputs.advantage.values != 0
        if IMITATION in inputs.columns:
            nonzero = nonzero | (inputs.columns[IMITATION].values != 0)
        acts = acts & nonzero
    return inputs.mask.with_values(acts).sum() > 0


def loss_terms(inputs: LossInputs, settings: ObjectiveSettings, meters: Meters) -> Jagged:
    """Loss per token with the optional terms: entropy mask, importance weight, KL penalty, imitation, entropy bonus."""
    loss = settings.build().terms(inputs, meters)
    mask = inputs.mask.values
    if entropy_mask.HIGH in inputs.columns:
        meters.share("high_entropy", inputs.columns[entropy_mask.HIGH].values, mask)
        ties = inputs.columns[entropy_mask.TIES].values
        meters.share("high_entropy_ties", ties, mask | ties)
    if entropy_mask.IN_LOSS in inputs.columns:
        loss = torch.where(inputs.columns[entropy_mask.IN_LOSS].values, loss, 0.0)
    if importance.WEIGHT in inputs.columns:
        loss = loss * inputs.columns[importance.WEIGHT].values
    if settings.kl.coefficient:
        if inputs.reference_logprobs is None:
            raise ValueError("objective: kl.coefficient is set, but the learner provided no reference log-probs.")
        penalty = kl_estimate(inputs.logprobs.values, inputs.reference_logprobs.values, settings.kl.estimator)
        meters.mean("kl_reference", penalty, mask)
        weights = inputs.columns.get(KL_WEIGHT)
        loss = loss + settings.kl.coefficient * (penalty if weights is None else weights.values * penalty)
    if IMITATION in inputs.columns:
        imitation = inputs.columns[IMITATION].values
        loss = loss - imitation * inputs.logprobs.values
        meters.mean("imitated_logprob", inputs.logprobs.values, mask & (imitation > 0))
    if inputs.entropies is not None:
        meters.mean("entropy", inputs.entropies.values, mask)
        if settings.entropy_bonus:
            loss = loss - settings.entropy_bonus * inputs.entropies.values
    # k3 of KL(π_old ‖ π_θ) with samples of π_old: e^l − 1 − l.
    meters.mean("approx_kl", kl_estimate(inputs.old_logprobs.values, inputs.logprobs.values.detach(), "k3"), mask)
    return inputs.logprobs.with_values(loss)


def counts(trained: Tensor) -> Tensor:
    """Denominators, float64 [2]: rows B and trained tokens Σ m, from the number of trained tokens of each row."""
    rows = torch.tensor(len(trained), device=trained.device)
    return torch.stack([rows, trained.sum()]).double()


def weights(mask: Jagged, settings: ObjectiveSettings, denominators: Tensor) -> Jagged:
    """Weight of each token's term, float32 over tokens, from global `denominators` (see `counts`); 0 where masked."""
    # At least 1: a step without any trained token has loss 0, not NaN.
    rows, tokens = (max(float(x), 1.0) for x in denominators)
    trained = mask.values.float()
    if settings.aggregate == "token_mean":
        return mask.with_values(trained / tokens)
    if settings.aggregate == "seq_mean_token_sum":
        return mask.with_values(trained / rows)
    if settings.aggregate == "constant":
        return mask.with_values(trained / (rows * settings.constant_length))
    share = 1.0 / (mask.sum().clamp(min=1).double() * rows)
    return mask.with_values(trained * mask.spread(share.float()).values)


def aggregate(loss: Jagged, mask: Jagged, settings: ObjectiveSettings, denominators: Tensor) -> Tensor:
    """This part's share of the loss; the sum over all parts of the batch is the loss."""
    weight = weights(mask, settings, denominators)
    # where, not a product: a masked token may hold inf or NaN.
    return torch.where(mask.values, loss.values, 0.0).mul(weight.values).sum()
