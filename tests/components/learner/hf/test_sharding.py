"""learner.hf sharded over gloo processes against one process: what it learns, holds, exports, saves and refuses."""

import pytest
import torch

from creditgraph.components.learner.hf.settings import HFSettings, choose_fsdp_size
from creditgraph.components.learner.lora import Lora
from creditgraph.pipeline.core.errors import RunError

# How the work was cut, and how long it took, not what was learned.
CUT = {"replayed_tokens", "forward_tokens", "shared_tokens", "unique_tokens", "imbalance_before", "imbalance_after"}


def check_equal(one, got, tolerance=1e-5):
    """Gradients, weights, log-probs and metrics of every case on every rank."""
    for rank in got:
        for case, expected in one.items():
            for kind in ("gradients", "weights"):
                assert rank[case][kind].keys() == expected[kind].keys()
                for name, tensor in expected[kind].items():
                    torch.testing.assert_close(rank[case][kind][name], tensor, rtol=0, atol=tolerance, msg=name)
            torch.testing.assert_close(rank[case]["logprobs"], expected["logprobs"], rtol=0, atol=tolerance)
            for ours, theirs in zip(rank[case]["metrics"], expected["metrics"], strict=True):
                assert {k: ours[k] for k in theirs.keys() - CUT} == pytest.approx(
                    {k: v for k, v in theirs.items() if k not in CUT}, rel=1e-4, abs=1e-5
                )


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks_learn_what_one_process_learns(sharded, pools, odd_model, tied):
    folder = odd_model(tied)
    check_equal(sharded.train(folder, 1, sharded.CASES), pools(2).run(sharded.train, folder, 2, sharded.CASES))


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 2])
def test_four_ranks_and_two_sharded_copies_learn_the_same(sharded, pools, odd_model, size):
    folder = odd_model()
    check_equal(sharded.train(folder, 1, sharded.CASES), pools(4).run(sharded.train, folder, size, sharded.CASES))


def test_experts_are_read_and_trained_in_shards(sharded, pools, odd_model):
    folder = odd_model(False, 5)
    cases = {"reinforce": sharded.CASES["reinforce"], sharded.training.REPLAY: sharded.CASES["reinforce"]}
    one = sharded.train(folder, 1, cases)
    check_equal(one, pools(2).run(sharded.train, folder, 2, cases))
    replayed, own = (one[case]["metrics"][0]["grad_norm"] for case in (sharded.training.REPLAY, "reinforce"))
    assert abs(replayed - own) > 1e-3


def test_bfloat16_layers_compute_with_float32_shards(sharded, pools, odd_model):
    folder = odd_model()
    cases = {name: sharded.CASES[name] for name in ("reinforce", "lora")}
    one = sharded.train(folder, 1, cases, "bfloat16")
    for rank in pools(2).run(sharded.train, folder, 2, cases, "bfloat16"):
        for name, expected in one.items():
            assert {t.dtype for t in rank[name]["weights"].values()} == {torch.bfloat16}
            for tensor, other in zip(rank[name]["weights"].values(), expected["weights"].values(), strict=True):
                # One step of bfloat16 in the largest weights.
                torch.testing.assert_close(tensor, other, rtol=2**-7, atol=2e-3)
    # What decides about kernels and the head's chunks is what layers compute in, not what the shards are kept in.
    assert pools(2).run(sharded.computes_in, folder, 2, "bfloat16") == [("torch.bfloat16", "torch.float32")] * 2


@pytest.mark.parametrize("lora", [0, 3])
def test_a_rank_reads_and_holds_its_share_only(sharded, pools, odd_model, lora):
    folder = odd_model(False)
    settings = sharded.CASES["reinforce"] | {"lora": Lora(rank=lora)}
    learner = sharded.learner_of(folder, settings)
    whole = sum(p.numel() for p in learner.model.causal_lm.parameters())
    adapters = sum(p.numel() for p in learner.model.trainable().values()) if lora else 0
    ranks = pools(2).run(sharded.memory, folder, 2, settings)
    assert sum(r["model"] for r in ranks) == whole
    assert sum(r["read"] for r in ranks) == whole - adapters
    for rank in ranks:
        assert rank["model"] < 0.55 * whole
        assert rank["held"] < 3 * 0.6 * (adapters or whole)  # weights and two moments; padding of odd sizes
        # Of the exported tensors only those of the last unit still have memory, and those made for adapters.
        assert rank["freed"] > 0.3 * rank["exported"] if lora else rank["freed"] > 0.8 * rank["exported"]


@pytest.mark.parametrize(("saved", "resumed"), [((4, 4), (2, 2)), ((2, 2), (4, 2)), ((4, 4), (1, 1)), ((2, 1), (2, 2))])
def test_a_checkpoint_continues_on_another_number_of_ranks(sharded, pools, odd_model, tmp_path, saved, resumed):
    folder, target = odd_model(), str(tmp_path / "shards")
    settings = sharded.CASES["ppo_clip"]
    (tmp_path / "shards").mkdir()
    first = pools(saved[0]).run(sharded.save_and_step, folder, saved[1], settings, target)[0]
    given = (folder, resumed[1], settings, first["state"], target)
    again = (
        [sharded.resume_and_step(*given)] if resumed[0] == 1 else pools(resumed[0]).run(sharded.resume_and_step, *given)
    )
    for rank in again:
        assert rank["version"] == first["version"]
        for name, tensor in first["weights"].items():
            torch.testing.assert_close(rank["weights"][name], tensor, rtol=0, atol=1e-6)


def test_a_checkpoint_continues_bit_for_bit(sharded, pools, odd_model, tmp_path):
    folder, target = odd_model(), str(tmp_path)
    first = pools(2).run(sharded.save_and_step, folder, 2, sharded.LORA, target)[0]
    again = pools(2).run(sharded.resume_and_step, folder, 2, sharded.LORA, first["state"], target)[0]
    assert all(torch.equal(again["weights"][name], tensor) for name, tensor in first["weights"].items())


def test_the_checkpoint_of_another_model_is_refused(sharded, pools, odd_model, tmp_path):
    target = str(tmp_path)
    pools(2).run(sharded.save_and_step, odd_model(True), 2, sharded.CASES["reinforce"], target)
    for settings in ({}, {"lora": Lora(rank=3)}):
        said = sharded.refused(odd_model(False), settings, target)
        assert "the checkpoint and the model differ in" in said
        assert "Resume with the model and LoRA settings that wrote it" in said
    (tmp_path / ".metadata").unlink()
    assert "expected the shards of learner.hf, got a folder without them" in sharded.refused(odd_model(), {}, target)


def test_ranks_that_do_not_divide_the_run_are_refused(sharded, pools, odd_model):
    for said in pools(4).run(sharded.refused, odd_model(), {"fsdp_size": 3}):
        assert said.startswith("learner.fsdp_size: 3 ranks hold one model, but the run has 4; expected a number that")
    assert "but the run has 1" in sharded.refused(odd_model(), {"fsdp_size": 2})
    with pytest.raises(ValueError, match="expected fsdp_size ≥ 0"):
        HFSettings(fsdp_size=-1)


def test_a_folder_without_all_weights_is_refused(sharded, pools, odd_model, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(odd_model(), tmp_path / "part")
    tensors = load_file(tmp_path / "part" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    for said in pools(2).run(sharded.refused, str(tmp_path / "part"), {"fsdp_size": 2}):
        assert "expected all 24 weights of the model, but 1 are missing, first 'model.norm.weight'" in said


def test_the_chosen_size_is_the_smallest_that_fits():
    gpu = 80 << 30
    # 14B with adapters on two GPUs; 7B in full on eight; a small model whole; too large for all: as small as can be.
    assert choose_fsdp_size(14_800_000_000, 0, 2, 1, 8, gpu) == 2
    assert choose_fsdp_size(7_600_000_000, 7_600_000_000, 2, 0, 8, gpu) == 8
    assert choose_fsdp_size(494_000_000, 494_000_000, 2, 1, 8, gpu) == 1
    assert choose_fsdp_size(70_000_000_000, 70_000_000_000, 2, 0, 6, gpu) == 6


def test_on_gpus_the_size_follows_their_memory(sharded, odd_model, monkeypatch):
    from types import SimpleNamespace

    from creditgraph.components.learner.hf.node import chosen_size
    from creditgraph.components.models.load import empty_causal_lm
    from creditgraph.pipeline.core.component import Context, ModelSpec
    from creditgraph.pipeline.core.ranks import Ranks

    spec = ModelSpec(path=odd_model(False))
    context = Context(device="cuda:0", ranks=Ranks(world=4, num_replicas=4), model=spec)
    model = empty_causal_lm(spec)
    state = 16 * sum(p.numel() for p in model.parameters())
    for memory, size in ((4 * state, 1), (4 * state - 1, 2), (state, 4)):
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert chosen_size(context, model, HFSettings()) == size


def test_the_optimiser_state_is_copied_to_the_cpu(sharded, odd_model, monkeypatch):
    learner = sharded.learner_of(odd_model(), sharded.CASES["reinforce"])
    learner.run(**dict(zip(("trajectories", "credit"), sharded.training.make_batch(0), strict=True)))
    kept = [
        *learner.optimizer._masters.values(),
        *(t for s in learner.optimizer._adam.state.values() for t in s.values()),
    ]
    monkeypatch.setattr(torch.Tensor, "clone", lambda *a, **k: pytest.fail("cloned where it lies"))
    state = learner.state_dict()["optimizer"]
    held = [*state["masters"].values(), *(t for m in state["moments"].values() for t in m.values())]
    assert {t.device.type for t in held} == {"cpu"}
    assert not {t.data_ptr() for t in held} & {t.data_ptr() for t in kept}


def test_the_state_of_another_learner_is_refused(sharded, odd_model):
    learner = sharded.learner_of(odd_model(), {})
    with pytest.raises(RunError, match=r"node 'learner': expected the optimiser state of a transformers model"):
        learner.load_state_dict({"version": 3})


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_on_two_ranks_learns_what_one_process_learns(sharded, pools, odd_model, tmp_path, tied):
    one = sharded.critic(odd_model(tied), 1)
    ranks = pools(2).run(sharded.critic, odd_model(tied), 2)
    again = pools(2).run(sharded.critic, odd_model(tied), 2, str(tmp_path))
    for step, expected in enumerate(one["values"]):
        got = torch.cat([rank["values"][step] for rank in ranks])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        assert torch.equal(got, torch.cat([rank["values"][step] for rank in again]))  # resumed before the last step
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-5)
