"""The layers that a model of `learner.megatron` is made of: megatron-core's own, or TransformerEngine's."""
