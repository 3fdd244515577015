"""What each component logs: add a line here with every `context.log(name=…)`, then call tools/update_docs.

Tuples that several components share stand first; DEFINITIONS has one entry per registered component, `()` for one that
logs nothing.
"""

from __future__ import annotations

from pipeline.core.metric import Definitions, Metric

_LENGTHS = (
    Metric("sampled_tokens", "tokens", "tokens sampled by this node; inherited ones do not count"),
    Metric("response_length", "tokens", "mean length of a response, inherited tokens included"),
    Metric("cut_share", "share", "responses that ran out of tokens or thoughts"),
)
_GROUPS = (
    Metric("groups", "groups", "groups of trajectories that are compared"),
    Metric("zero_variance_share", "share", "groups that give no signal, all their rewards being equal or invalid"),
    Metric("reward_std", "reward", "standard deviation of the reward within a group, mean over groups"),
)
_TREES = (
    Metric("nodes", "nodes", "segments per tree, shared ones once"),
    Metric("leaves", "leaves", "responses per tree"),
    Metric("depth", "segments", "mean number of segments from root to leaf"),
    Metric("max_depth", "segments", "segments on the longest path"),
    Metric("zero_share", "share", "segments whose advantage is 0"),
    Metric("advantage_size", "reward", "mean absolute advantage of a segment"),
    Metric("trained_share", "share", "response tokens that are trained"),
    Metric("untrained_rows", "rows", "responses of which no token is trained"),
)
_VALUES = (
    Metric("mean", "reward", "mean value over boundaries"),
    Metric("boundaries", "boundaries", "boundaries that got a value"),
)
_COSTS = (
    Metric("scored_tokens", "tokens", "tokens passed through the model to be scored, context included"),
    Metric("generated_tokens", "tokens", "tokens sampled to estimate values; 0 for teacher-forced estimates"),
)
_EMPTY_BANK = Metric(
    "empty_bank_share", "share", "trajectories without a reference answer to score; their values are 0"
)
_SEGMENTS = (Metric("segments", "segments", "segments per response"),)
_STEP_FRACTION = (
    Metric("step_fraction", "share", "(localised step − 1) / thoughts, mean over failures: 0 is the first thought"),
)
_ENGINE = (
    Metric("sampled_tokens", "tokens", "tokens generated, whoever asked, evaluation included"),
    Metric("scored_tokens", "tokens", "tokens of teacher-forced scoring, context included"),
    Metric("rows_without_room", "rows", "requests whose prompt fills the model's context; they get no tokens"),
    Metric("seconds_load", "s", "wall time of taking new weights"),
    Metric("seconds_generate", "s", "wall time inside `generate`"),
    Metric("seconds_score", "s", "wall time inside `score`"),
)
_EXTERNAL = (
    Metric(
        "update_difference",
        "nats",
        "engine in this process: largest difference of a fixed sequence's log-probs from those of the new weights",
    ),
    Metric("servers_ready", "servers", "servers that hold the present weights and answer"),
    Metric("servers_lost", "servers", "servers that stopped answering"),
    Metric("requests", "requests", "requests sent to servers, repeated ones included"),
    Metric("retries", "requests", "requests sent once more, after a failure or an unsound answer"),
    Metric("aborted", "requests", "answers a server broke off, whose rows were asked again"),
    Metric("seconds_update", "s", "wall time until every server held the new weights, or was given up"),
)
_LEARNER = (
    Metric("loss", "loss", "loss of an optimiser step, mean over the steps of the iteration"),
    Metric("grad_norm", "norm", "norm of the gradient before clipping, mean over steps"),
    Metric("lr", "rate", "learning rate, mean over steps"),
    Metric("steps", "steps", "optimiser steps made"),
    Metric("skipped_zero_credit", "steps", "steps without any credit; only the schedule goes on"),
    Metric("skipped_nonfinite", "steps", "steps whose loss or gradient was not finite; the weights stay"),
    Metric("trained_tokens", "tokens", "tokens in the loss, once per epoch"),
    Metric("trained_tokens_total", "tokens", "`trained_tokens` since the run began"),
    Metric("forward_tokens", "tokens", "tokens passed through the model in training passes"),
    Metric(
        "unique_tokens",
        "tokens",
        "least number of tokens that `forward_tokens` could be, every shared prefix passed once",
    ),
    Metric("shared_tokens", "tokens", "tokens that sharing prefixes saved"),
    Metric("pack_waste", "share", "slots of micro-batches that hold padding"),
    Metric("zero_credit_rows", "share", "trajectories without a trained token of non-zero advantage"),
    Metric("policy_lag", "versions", "learner's version minus the version that sampled, mean over trajectories"),
    Metric("version", "number", "version of the published weights"),
    Metric("entropy", "nats", "entropy of the policy, mean over trained tokens"),
    Metric("approx_kl", "nats", "k3 estimate of KL(old ‖ present policy) per trained token"),
    Metric("kl_reference", "nats", "estimate of KL(policy ‖ reference) per trained token, with `objective.kl`"),
    Metric("ratio_mean", "ratio", "mean of π/π_old over trained tokens (sequences for `sequence`)"),
    Metric("ratio_max", "ratio", "largest π/π_old"),
    Metric("ratio_overflow", "share", "tokens whose log-ratio was cut to keep exp finite"),
    Metric("clip_fraction", "share", "trained tokens whose gradient clipping stopped"),
    Metric("clip_fraction_low", "share", "those clipped from below"),
    Metric("clip_fraction_high", "share", "those clipped from above"),
    Metric("clip_fraction_dual", "share", "those stopped by the second clip of negative advantages"),
    Metric("gradient_scale", "ratio", "trace objectives: mean factor on the gradient of a trained token"),
    Metric("trace_weight", "ratio", "trace objectives: mean weight Π ratio^w of the tokens before"),
    Metric("trace_weight_max", "ratio", "trace objectives: largest of these weights"),
    Metric("high_entropy", "share", "trained tokens that the entropy mask keeps"),
    Metric("importance_weight", "ratio", "mean weight learner/engine with `objective.importance_cap`"),
    Metric("importance_capped", "share", "tokens whose weight learner/engine was capped"),
    Metric("shaped_weight", "ratio", "mean shaped weight p/(p + γ) over shaped tokens"),
    Metric("shaped_share", "share", "trained tokens that are shaped"),
    Metric("mismatch_abs", "nats", "mean |log p of the learner − of the engine| at equal weights"),
    Metric("mismatch_abs_max", "nats", "largest of these"),
    Metric("mismatch_kl", "nats", "k3 estimate of KL(engine ‖ learner) at equal weights"),
    Metric(
        "mismatch_ess", "share", "effective sample size of weighing engine tokens by learner/engine; 1 when both agree"
    ),
    Metric("imbalance_before", "ratio", "longest replica over the mean, in tokens, if rows kept their order"),
    Metric("imbalance_after", "ratio", "the same after rows were given to replicas by cost"),
    Metric("seconds_forward_backward", "s", "wall time of forward and backward passes"),
    Metric("seconds_optimizer", "s", "wall time of optimiser steps"),
    Metric("seconds_publish", "s", "wall time of handing out the new weights"),
    Metric("seconds_old_logprobs", "s", "wall time of recomputing old log-probs"),
    Metric("seconds_reference", "s", "wall time of the reference's log-probs"),
)

_LOADED = (
    Metric("rejected", "rows", "rows of the data section that could not be used, told once when it is read"),
    Metric(
        "duplicates",
        "rows",
        "rows of the data section left out as their question was met before, told once when it is read",
    ),
)

DEFINITIONS: Definitions = {
    "prompts.dataset": (
        Metric("epoch", "epochs", "passes over the data so far"),
        Metric("rows", "rows", "problems of the data section"),
        *_LOADED,
    ),
    "engine.local": (
        *_ENGINE,
        Metric("prefill_tokens", "tokens", "prompt tokens passed through the model, equal prefixes once"),
        Metric("seconds_attribute", "s", "wall time of gradient attribution"),
    ),
    "engine.vllm": (
        *_ENGINE,
        Metric("prefill_tokens", "tokens", "prompt tokens passed through the model, engine in this process"),
        Metric("cached_tokens", "tokens", "prompt tokens that vLLM's prefix cache held"),
        *_EXTERNAL,
    ),
    "engine.sglang": (*_ENGINE, *_EXTERNAL),
    "sampler.chains": _LENGTHS,
    "sampler.partial": (
        *_LENGTHS,
        Metric(
            "decode_steps",
            "steps",
            "most tokens a rollout got in this iteration: decoding steps when all rollouts fit the engine",
        ),
        Metric("delivered_groups", "groups", "complete groups handed on"),
        Metric("carried_groups", "groups", "groups in flight, which go on in the next iteration"),
        Metric("carried_rollouts", "responses", "rollouts in flight that have not ended"),
        Metric("carried_tokens", "tokens", "tokens held by groups in flight, those of ended rollouts included"),
        Metric(
            "token_staleness",
            "versions",
            "sampler's version minus the one that sampled the token, mean over delivered tokens",
        ),
        Metric(
            "rollout_staleness",
            "versions",
            "sampler's version minus that of the oldest token, mean over delivered trajectories",
        ),
        Metric("staleness_max", "versions", "largest of these"),
        Metric("dropped_groups", "groups", "groups dropped because a rollout was unfinished at `carry.max_staleness`"),
        Metric("dropped_tokens", "tokens", "tokens sampled for dropped groups"),
        Metric(
            "rescored_tokens",
            "tokens",
            "tokens of older weights whose log-probs were scored again, with `carry.on_continue: rescore`",
        ),
    ),
    "sampler.failures": (
        *_LENGTHS,
        Metric("attempts", "responses", "chains sampled per prompt"),
        Metric("discarded", "responses", "chains that are neither in a base group nor a seed"),
        Metric("fallback_share", "share", "prompts that failed too seldom for failures and got a larger group instead"),
        Metric("failures", "responses", "failed chains given to the localizer"),
    ),
    "sampler.dynamic": (
        *_LENGTHS,
        Metric("waves", "waves", "waves of sampling"),
        Metric("signal_share", "share", "sampled prompts whose rewards differ"),
        Metric("groups", "groups", "groups handed on"),
        Metric("missing_groups", "groups", "groups that were wanted and not found"),
        Metric("surplus_groups", "groups", "groups with a signal beyond those wanted; their prompts wait"),
        Metric("backlog", "prompts", "prompts that wait for the next iteration"),
    ),
    "sampler.retry": (
        *_LENGTHS,
        Metric("no_retry_share", "share", "first attempts that left no room for a second one"),
        Metric("unended_retry_share", "share", "second attempts without an end"),
        Metric("unchanged_share", "share", "second attempts with the text of the first"),
    ),
    "sampler.critique": (
        *_LENGTHS,
        Metric("wrong", "rows", "originals that are wrong"),
        Metric("refinements", "rows", "refinements sampled"),
        Metric("unended_share", "share", "refinements without an end"),
        Metric("refined_correct_share", "share", "refinements that are right"),
        Metric("kept", "rows", "refinements handed on, at most one per prompt"),
        Metric("kept_correct_share", "share", "kept refinements that are right"),
        Metric("no_refinement_share", "share", "prompts without a kept refinement"),
        Metric(
            "refinement_logprob_change",
            "nats",
            "log-prob of a kept token under the problem alone minus under the critique, mean",
        ),
    ),
    "verifier.exact": (),
    "verifier.math": (
        Metric("worker_restarts", "workers", "math-verify workers replaced since the run began"),
        Metric("killed", "items", "comparisons that ran into a limit since the run began"),
        Metric("text_only", "items", "comparisons as text since the run began, as math-verify could not read a side"),
    ),
    "verifier.choice": (),
    "verifier.boolean": (),
    "verifier.regex": (),
    "verifier.code": (),
    "verifier.composite": (),
    "verifier.external": (Metric("failures", "items", "verdicts the server did not give since the run began"),),
    "rewards.outcome": (
        Metric("mean", "reward", "mean reward of a trajectory, invalid ones as 0"),
        Metric("correct", "share", "trajectories judged right"),
        Metric("invalid", "rows", "trajectories without a usable verdict; they get no credit"),
    ),
    "rewards.overlong": (
        Metric("punished_share", "share", "trajectories that got a punishment"),
        Metric("punishment", "reward", "mean punishment of a trajectory, 0 or less"),
    ),
    "segmenter.thought": (
        *_SEGMENTS,
        Metric("searched_share", "share", "responses without recorded thoughts, whose text was searched"),
    ),
    "segmenter.fixed": _SEGMENTS,
    "segmenter.entropy_cuts": _SEGMENTS,
    "segmenter.keyword_entropy": (*_SEGMENTS, Metric("splits", "segments", "segments per response before merging")),
    "value.answer_likelihood": (
        *_VALUES,
        *_COSTS,
        _EMPTY_BANK,
        Metric(
            "no_room",
            "boundaries",
            "boundaries after which the reference did not fit the context; they take the value before",
        ),
    ),
    "value.monte_carlo": (
        *_VALUES,
        *_COSTS,
        Metric("continuations", "responses", "continuations sampled"),
        Metric("invalid", "responses", "continuations without a usable verdict; they do not count"),
    ),
    "value.leave_one_out": (*_COSTS, _EMPTY_BANK),
    "value.gradient_attribution": (*_COSTS, _EMPTY_BANK),
    "localizer.self": (
        Metric("boxed_share", "share", "failures whose step was read from a box"),
        Metric("step_share", "share", "failures whose step was read from the text"),
        Metric("default_share", "share", "failures whose answer named no step"),
        *_STEP_FRACTION,
        Metric("sampled_tokens", "tokens", "tokens of the answers"),
    ),
    "localizer.uniform": _STEP_FRACTION,
    "localizer.oracle": _STEP_FRACTION,
    "expander.reset": (
        *_LENGTHS,
        Metric("inherited_tokens", "tokens", "tokens taken over from failures"),
        Metric("prefix_share", "share", "kept part of a seed, mean"),
        Metric("empty_prefix_share", "share", "failures of which nothing is kept"),
    ),
    "expander.tree": (
        *_LENGTHS,
        Metric("leaves", "leaves", "responses per prompt"),
        Metric("fewest_leaves", "leaves", "responses of the prompt with the fewest"),
        Metric("inherited_tokens", "tokens", "tokens shared with a leaf before"),
        Metric("discarded_tokens", "tokens", "sampled tokens of no leaf"),
        Metric("missed_branches", "branches", "branches that were wanted and found no place"),
    ),
    "reviser.compare": (
        *_LENGTHS,
        Metric("revisions", "rows", "revisions sampled"),
        Metric("unrevised_share", "share", "wrong trajectories without a revision"),
        Metric("no_correct_sibling_share", "share", "wrong trajectories of groups without a right one"),
        Metric("correct_reference_share", "share", "revisions that were shown a right reference"),
        Metric("unended_share", "share", "revisions without an end"),
        Metric("invalid", "rows", "revisions without a usable verdict"),
        Metric("repaired_share", "share", "revisions that are right"),
        Metric("repaired_by_correct", "share", "the same among those shown a right reference"),
        Metric("repaired_by_wrong", "share", "the same among those shown a wrong one"),
    ),
    "buffer.merge": (
        Metric("trajectories", "rows", "trajectories handed on"),
        Metric("groups", "groups", "groups among them"),
    ),
    "advantage.group": _GROUPS,
    "advantage.td": (
        Metric("advantage_size", "reward", "mean absolute advantage of a segment"),
        Metric("zero_share", "share", "segments whose advantage is 0"),
    ),
    "advantage.additive": (Metric("gain_size", "reward", "mean absolute gain of a segment"),),
    "advantage.redistribute": (
        Metric("residual", "reward", "mean |reward − sum of the gains| of a trajectory"),
        Metric("factor_max", "ratio", "largest factor on a segment's share"),
        Metric("uniform_share", "share", "trajectories whose segments all get the same"),
    ),
    "advantage.tree_siblings": _TREES,
    "advantage.tree_paths": _TREES,
    "advantage.counterfactual": (
        *_GROUPS,
        Metric("reward_var", "reward²", "variance of the reward"),
        Metric("shaped_reward_var", "reward²", "variance of the shaped reward"),
        Metric(
            "shaping_bound",
            "ratio",
            "2pE[φ]/Var φ: below it, shaping lowers the variance of 0/1 rewards; infinite where φ does not vary",
        ),
        Metric("wrong", "rows", "trajectories judged wrong"),
        Metric("revised_share", "share", "wrong trajectories with a revision"),
        Metric("repair_rate", "share", "revisions that are right, mean over wrong trajectories"),
        Metric("repaired_share", "share", "wrong trajectories with a right revision"),
        Metric("edited_share", "share", "tokens that the repair changes, mean over repaired trajectories"),
        Metric("raised_edit_share", "share", "repaired trajectories whose wrong tokens are raised (A' > 0)"),
    ),
    "advantage.retry": (
        Metric("stage", "number", "1 or 2: the stage of training"),
        *_GROUPS,
        Metric("first_correct", "share", "first attempts that are right"),
        Metric("second_correct", "share", "second attempts that are right"),
        Metric("turned_right", "share", "pairs that went from wrong to right"),
        Metric("turned_wrong", "share", "pairs that went from right to wrong"),
    ),
    "advantage.critique": (
        *_GROUPS,
        Metric("refined", "rows", "refinements among the trajectories"),
        Metric("refined_advantage", "reward", "mean advantage of a refinement"),
    ),
    "learner.hf": _LEARNER,
    "learner.megatron": (
        *_LEARNER,
        Metric("bubble", "share", "time of the passes in which a pipeline rank did not compute, mean over ranks"),
        Metric("bubble_max", "share", "the same of the most idle rank"),
    ),
    "evaluator.accuracy": (
        Metric("accuracy", "share", "held-out problems solved by greedy decoding"),
        Metric("problems", "problems", "held-out problems asked"),
        *_LOADED,
        Metric("mean_at_<n>", "share", "right answers among n samples per problem"),
        Metric("pass_at_<k>", "share", "unbiased estimate that at least one of k samples is right"),
    ),
    "evaluator.resets": (
        Metric("failures", "failures", "failures with a localised step"),
        *_STEP_FRACTION,
        Metric("correction", "share", "suffixes that end right"),
        Metric("corrected", "share", "failures with a suffix that ends right"),
        Metric("clean", "share", "failures reset at or before their true first error, so that the prefix holds none"),
        Metric("exact", "share", "failures reset at their true first error"),
        Metric("correction_clean", "share", "`correction` of clean prefixes"),
        Metric("corrected_clean", "share", "`corrected` of clean prefixes"),
        Metric("correction_erroneous", "share", "`correction` of prefixes that hold an error"),
        Metric("corrected_erroneous", "share", "`corrected` of prefixes that hold an error"),
    ),
}
