"""The megatron-core learner: tensor, pipeline, data, sequence, context and expert parallel."""
