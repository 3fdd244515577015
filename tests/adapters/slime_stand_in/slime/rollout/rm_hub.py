"""Rewards of samples."""

from creditgraph.components.text.templates import extract_answer


async def async_rm(args, sample, **kwargs):
    """1 where the answer in the response's last box is the label."""
    assert args.rm_type == "math"
    return int(extract_answer(sample.response) == sample.label)
