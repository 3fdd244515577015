"""The megatron-core learner: tensor, pipeline, data, sequence and context parallel."""
