"""Batches: rows stay together, and a mistake names what differs."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from creditgraph.pipeline.core.errors import AlignmentError, CreditgraphError
from creditgraph.pipeline.core.handles import known_entropies
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import (
    Batch,
    Credit,
    Prompts,
    Rewards,
    StepErrors,
    Trajectories,
    Weights,
    check_aligned,
)


def tensor(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def prompts(*uids: int) -> Prompts:
    return Prompts(
        uid=tensor(*uids),
        tokens=Jagged.from_rows([[u] * (u % 3) for u in uids], torch.int32),
        text=[f"t{u}" for u in uids],
        answer=[str(u) for u in uids],
        metadata=[{"row": u} for u in uids],
    )


def credit(*uids: int, columns: tuple[str, ...] = ()) -> Credit:
    rows = Jagged.from_rows([[float(u), float(u)] for u in uids], torch.float32)
    return Credit(
        uid=tensor(*uids), advantage=rows, mask=rows.with_values(rows.values > 0), columns=dict.fromkeys(columns, rows)
    )


def test_select_takes_whole_rows() -> None:
    picked = prompts(4, 5, 6).select(tensor(2, 0, 2))
    assert picked.uid.tolist() == [6, 4, 6]
    assert picked.tokens.to_lists() == [[], [4], []]
    assert (picked.text, picked.answer) == (["t6", "t4", "t6"], ["6", "4", "6"])
    assert picked.metadata == [{"row": 6}, {"row": 4}, {"row": 6}]
    assert prompts(4, 5, 6).select(torch.tensor([False, True, False])).text == ["t5"]
    assert len(prompts(4, 5).select(tensor())) == 0


def test_select_follows_columns() -> None:
    picked = credit(1, 2, 3, columns=("values",)).select(tensor(1))
    assert picked.columns["values"].to_lists() == [[2.0, 2.0]]
    assert type(picked) is Credit


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), unique=True, max_size=8), st.integers(0, 8))
def test_concat_of_a_cut_is_the_whole(uids: list[int], cut: int) -> None:
    whole = prompts(*uids)
    both = Prompts.concat([prompts(*uids[:cut]), prompts(*uids[cut:])])
    assert both.uid.tolist() == uids
    assert both.tokens.equal(whole.tokens)
    assert (both.text, both.answer, both.metadata) == (whole.text, whole.answer, whole.metadata)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-(2**62), 2**62), unique=True, min_size=1, max_size=12), st.data())
def test_index_of_is_list_index(uids: list[int], data: st.DataObject) -> None:
    requested = data.draw(st.lists(st.sampled_from(uids), max_size=20))
    assert Batch(uid=tensor(*uids)).index_of(tensor(*requested)).tolist() == [uids.index(u) for u in requested]


def test_index_of_names_what_is_missing() -> None:
    batch = Batch(uid=tensor(5, 3))
    object.__setattr__(batch, "origin", "sampler.failures")
    with pytest.raises(
        AlignmentError,
        match=r"^sampler\.failures: no row for uid \[4, 9\]… \(2 missing\); expected every referenced uid\.",
    ):
        batch.index_of(tensor(3, 9, 4))
    with pytest.raises(AlignmentError, match=r"^Batch: no row for uid \[1\]… \(1 missing\)"):
        Batch(uid=tensor()).index_of(tensor(1))
    assert Batch(uid=tensor()).index_of(tensor()).tolist() == []


def test_check_aligned_texts() -> None:
    left, right = Batch(uid=tensor(1, 2, 3)), Rewards(**rewards(2, 3, 4))
    object.__setattr__(left, "origin", "buffer.trajectories")
    with pytest.raises(AlignmentError) as caught:
        check_aligned(left, right)
    assert str(caught.value) == (
        "buffer.trajectories (3 rows) and Rewards (3 rows) describe different populations: 1 rows only in "
        "buffer.trajectories, 1 only "
        "in Rewards; expected the same uids in the same order. Wire both inputs from the same population."
    )
    with pytest.raises(AlignmentError, match="the same rows in another order"):
        check_aligned(Batch(uid=tensor(1, 2)), Batch(uid=tensor(2, 1)))
    check_aligned(Batch(uid=tensor(1, 2)), Batch(uid=tensor(1, 2)))


def rewards(*uids: int) -> dict[str, Any]:
    n = len(uids)
    ones = torch.ones(n, dtype=torch.bool)
    return {"uid": tensor(*uids), "value": torch.ones(n), "correct": ones, "valid": ones, "detail": [""] * n}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"value": torch.ones(3)}, "Rewards.value: 3 rows, but uid has 2; every field needs one row per uid."),
        ({"detail": [""]}, "Rewards.detail: 1 rows, but uid has 2"),
    ],
)
def test_fields_of_other_lengths_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(AlignmentError, match=text.replace(".", r"\.")):
        Rewards(**(rewards(1, 2) | change))
    with pytest.raises(AlignmentError):
        Rewards(**rewards(1, 2)).replace(**change)


def test_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(AlignmentError, match=r"Credit\.columns: 1 rows, but uid has 2"):
        credit(1, 2).replace(columns={"x": Jagged.from_rows([[1.0]])})


def test_concat_refusals() -> None:
    with pytest.raises(AlignmentError, match=r"Credit\.concat: no batches; expected at least one\."):
        Credit.concat([])
    with pytest.raises(
        AlignmentError,
        match=r"Credit\.columns: batches with columns \[\['a'\], \[\]\]; expected the same columns in all\.",
    ):
        Credit.concat([credit(1, columns=("a",)), credit(2)])


def test_replace_copies_and_payloads_are_frozen() -> None:
    errors = StepErrors(uid=tensor(1), step=tensor(2), source=["boxed"])
    changed = errors.replace(step=tensor(3))
    assert (errors.step.tolist(), changed.step.tolist(), changed.source) == ([2], [3], ["boxed"])
    for payload in (errors, Weights(version=0)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            payload.version = 1  # type: ignore[misc, union-attr]


def test_trajectories_stay_whole_under_select_and_concat() -> None:
    jagged = Jagged.from_rows([[1, 2], [3]], torch.int32)
    floats = jagged.to(torch.float32)
    t = Trajectories(
        uid=tensor(10, 11), prompt_uid=tensor(1, 1), group=tensor(1, 1), parent=tensor(-1, 10),
        prompt_tokens=jagged, response_tokens=jagged, inherited=tensor(0, 1), engine_logprobs=floats, entropies=floats,
        thought_ends=jagged, policy_version=tensor(0, 0), finish_reason=["eos", "stop"], text=["a", "b"],
    )  # fmt: skip
    back = Trajectories.concat([t.select(tensor(1)), t.select(tensor(0))]).select(tensor(1, 0))
    for f in dataclasses.fields(t):
        a, b = getattr(t, f.name), getattr(back, f.name)
        assert a.equal(b) if isinstance(a, Jagged | torch.Tensor) else a == b, f.name


def test_entropies_that_an_engine_left_out_are_reported() -> None:
    assert known_entropies(torch.tensor([0.5, 0.0]), "reader").tolist() == [0.5, 0.0]
    with pytest.raises(
        CreditgraphError, match=r"reader: the engine gave no entropy for 1 of 2 tokens; expected all of them"
    ):
        known_entropies(torch.tensor([0.5, float("nan")]), "reader")
