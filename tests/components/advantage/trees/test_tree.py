"""Trees of trajectories, their values and both advantages: numbers by hand, a slow recursion, identities."""

import math
import random
import statistics

import pytest
import torch
from reference_trees import token_owner

from creditgraph.components.advantage.group import group_advantage
from creditgraph.components.advantage.trees.leaves import TreeLeaves
from creditgraph.components.advantage.trees.paths import TreePaths
from creditgraph.components.advantage.trees.siblings import TreeSiblings
from creditgraph.components.advantage.trees.tree import (
    node_values,
    once_mask,
    parent_values,
    path_advantage,
    sibling_advantage,
    tree_of,
)
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged


def _batch(toolbox, parent, inherited, length, group=None, logprob=None, first_uid=1000):
    """Rows by lineage; `parent` holds rows, −1 for none."""
    changes = {"parent": torch.tensor([first_uid + p if p >= 0 else -1 for p in parent], dtype=torch.int64)}
    texts = ["x" * n for n in length]
    if logprob is not None:
        changes["engine_logprobs"] = Jagged.from_rows(logprob, torch.float32)
    return toolbox.trajectories(texts, group=group, inherited=inherited, first_uid=first_uid, **changes)


#   root ─ a [0,3) ─┬─ b [3,5)   row 0, reward 1
#        │          └─ c [3,6)   row 1, reward 0
#        └ d [0,2)              row 2, reward 0
PARENT, INHERITED, LENGTH = [-1, 0, -1], [0, 3, 0], [5, 6, 2]
REWARD, VALID = torch.tensor([1.0, 0.0, 0.0]), torch.ones(3, dtype=torch.bool)


def test_nodes_by_hand(toolbox):
    tree = tree_of(_batch(toolbox, PARENT, INHERITED, LENGTH))
    # Node 0 = a, 1 = b, 2 = d (roots come before what continues them), 3 = c.
    assert tree.path.to_lists() == [[0, 1], [0, 3], [2]]
    assert tree.ends.to_lists() == [[3, 5], [3, 6], [2]]
    assert tree.parent.tolist() == [-1, 0, -1, 0]
    assert tree.depth.tolist() == [1, 2, 1, 2]
    assert tree.root.tolist() == [0, 0, 0, 0]
    assert tree.spread(torch.tensor([10, 11, 12, 13])).tolist() == [10, 10, 10, 11, 11, 10, 10, 10, 13, 13, 13, 12, 12]


def test_values_by_hand(toolbox):
    tree = tree_of(_batch(toolbox, PARENT, INHERITED, LENGTH))
    leaves = node_values(tree, REWARD, VALID)
    assert leaves.node.tolist() == [0.5, 1, 0, 0]
    assert leaves.root.tolist() == [pytest.approx(1 / 3)]
    assert leaves.leaves.tolist() == [2, 1, 1, 1]
    # Over children the root is the mean of a (1/2) and d (0).
    children = node_values(tree, REWARD, VALID, "children")
    assert children.node.tolist() == [0.5, 1, 0, 0]
    assert children.root.tolist() == [0.25]


def test_sibling_advantage_by_hand(toolbox):
    node = toolbox.start(TreeSiblings, max_probability=1.0)
    batch = _batch(toolbox, PARENT, INHERITED, LENGTH)
    credit = node.run(trajectories=batch, rewards=toolbox.rewards(batch.uid, [1, 0, 0])).credit
    # a: 1/2 − (1/2 + 0)/2; b: 1 − 1/2; c: 0 − 1/2; d: 0 − 1/4.
    assert credit.advantage.to_lists() == [[0.25] * 3 + [0.5] * 2, [0.25] * 3 + [-0.5] * 3, [-0.25] * 2]
    assert credit.mask.to_lists() == [[True] * 5, [False] * 3 + [True] * 3, [True] * 2]
    metrics = node.context.metrics
    assert (metrics["nodes"], metrics["leaves"], metrics["max_depth"], metrics["zero_share"]) == (4, 3, 2, 0)
    assert metrics["depth"] == pytest.approx(5 / 3)
    assert metrics["trained_share"] == pytest.approx(10 / 13)


def test_path_advantage_by_hand(toolbox):
    node = toolbox.start(TreePaths)
    batch = _batch(toolbox, PARENT, INHERITED, LENGTH)
    credit = node.run(trajectories=batch, rewards=toolbox.rewards(batch.uid, [1, 0, 0])).credit
    # V(root) = 1/3. a: [(1/2 − 1/3) + (1/2 − 1/3)]/√2; b: (1 − 1/3) + (1 − 1/2); c: −1/3 − 1/2; d: −1/3 − 1/3.
    a, b, c, d = (1 / 3) / math.sqrt(2), 7 / 6, -5 / 6, -2 / 3
    for row, expected in enumerate([[a] * 3 + [b] * 2, [a] * 3 + [c] * 3, [d] * 2]):
        assert credit.advantage.row(row).tolist() == pytest.approx(expected)
    assert bool(credit.mask.values.all())
    assert node.context.metrics["trained_share"] == 1
    once = (
        toolbox.start(TreePaths, shared="once")
        .run(trajectories=batch, rewards=toolbox.rewards(batch.uid, [1, 0, 0]))
        .credit
    )
    assert once.mask.to_lists() == [[True] * 5, [False] * 3 + [True] * 3, [True] * 2]
    assert once.advantage.equal(credit.advantage)


def test_leaves_by_hand(toolbox):
    node = toolbox.start(TreeLeaves, normalize="mean")
    batch = _batch(toolbox, PARENT, INHERITED, LENGTH)
    rewards = toolbox.rewards(batch.uid, [1, 0, 0])
    credit = node.run(trajectories=batch, rewards=rewards).credit
    # Rows 0 and 1 share a, so within their tree 1/2 and −1/2; row 2 has one alone. Across the prompt, mean 1/3: 2/3,
    # −1/3, −1/3. a has the sum over rows 0 and 1, in which 1/2 and −1/2 cancel: 2/3 − 1/3.
    a, b, c, d = 1 / 3, 7 / 6, -5 / 6, -1 / 3
    for row, expected in enumerate([[a] * 3 + [b] * 2, [a] * 3 + [c] * 3, [d] * 2]):
        assert credit.advantage.row(row).tolist() == pytest.approx(expected)
    assert credit.mask.to_lists() == [[True] * 5, [False] * 3 + [True] * 3, [True] * 2]
    texts = node.explain({"credit": credit}, trajectories=batch, rewards=rewards)
    assert "0 + (+.333) = +.333, leaves below: 2" in texts[0]
    # With row 0 invalid, row 1 is alone in its tree, and −1/2 and 1/2 are left across: 0 against 1 of row 2.
    rewards = toolbox.rewards(batch.uid, [float("nan"), 0, 1], valid=[False, True, True])
    credit = node.run(trajectories=batch, rewards=rewards).credit
    assert credit.advantage.to_lists() == [[0.0] * 5, [-0.5] * 6, [0.5] * 2]


@pytest.mark.parametrize("normalize", ["mean", "std"])
def test_leaves_train_what_training_on_every_path_does(toolbox, normalize):
    rng = random.Random(5)
    for _ in range(10):
        parent, inherited, length, reward, valid = _random_tree(rng, rng.randint(1, 9))
        batch = _batch(toolbox, parent, inherited, length)
        rewards = toolbox.rewards(batch.uid, reward, valid)
        credit = toolbox.start(TreeLeaves, normalize=normalize).run(trajectories=batch, rewards=rewards).credit
        begins = [token_owner(i, 0, parent, inherited) if length[i] else i for i in range(len(length))]

        def compared(i, members, reward=reward, valid=valid):
            if not valid[i]:
                return 0.0
            known = [reward[j] for j in members if valid[j]]
            spread = statistics.pstdev(known) + 1e-6 if normalize == "std" else 1.0
            return (reward[i] - sum(known) / len(known)) / spread

        slow, fast = {}, {}
        for i in range(len(length)):
            own = compared(i, [j for j in range(len(length)) if begins[j] == begins[i]])
            own += compared(i, range(len(length)))
            for t in range(length[i]):
                key = (token_owner(i, t, parent, inherited), t)
                slow[key] = slow.get(key, 0.0) + own
                if credit.mask.row(i)[t]:
                    assert key not in fast
                    fast[key] = float(credit.advantage.row(i)[t])
        assert fast == pytest.approx(slow, abs=1e-4)


def _random_tree(rng, rows):
    parent, inherited, length = [], [], []
    for row in range(rows):
        parent.append(rng.randrange(-1, row) if row else -1)
        inherited.append(rng.randint(0, length[parent[-1]]) if parent[-1] >= 0 else 0)
        length.append(inherited[-1] + rng.randint(0, 4))
    reward = [rng.choice([0.0, 0.5, 1.0]) for _ in range(rows)]
    valid = [rng.random() > 0.2 for _ in range(rows)]
    return parent, inherited, length, reward, valid


@pytest.mark.parametrize("seed", range(12))
def test_slow_recursion(toolbox, reference, seed):
    rng = random.Random(seed)
    for _ in range(6):
        parent, inherited, length, reward, valid = _random_tree(rng, rng.randint(1, 9))
        batch = _batch(toolbox, parent, inherited, length)
        # Rows in any order.
        order = torch.tensor(rng.sample(range(len(parent)), len(parent)))
        tree = tree_of(batch.select(order))
        r, ok = torch.tensor(reward)[order], torch.tensor(valid)[order]
        for method, advantage in (("siblings", sibling_advantage), ("paths", path_advantage)):
            for value in ("leaves", "children") if method == "siblings" else ("leaves",):
                fast = batch.select(order).response_tokens.with_values(
                    tree.spread(advantage(tree, node_values(tree, r, ok, value)))
                )
                slow = reference.tree_credit(parent, inherited, length, reward, valid, method, value)
                for place, row in enumerate(order.tolist()):
                    assert fast.row(place).tolist() == pytest.approx([x or 0.0 for x in slow[row]]), (method, value)


@pytest.mark.parametrize("seed", range(5))
def test_values_are_leaf_means_and_advantages_balance(toolbox, seed):
    rng = random.Random(100 + seed)
    parent, inherited, length, reward, valid = _random_tree(rng, 12)
    tree = tree_of(_batch(toolbox, parent, inherited, length))
    r, ok = torch.tensor(reward), torch.tensor(valid)
    values = node_values(tree, r, ok)
    below = [
        [i for i, path in enumerate(tree.path.to_lists()) if node in path and valid[i]] for node in range(len(tree))
    ]
    means = [sum(reward[i] for i in leaves) / len(leaves) if leaves else 0.0 for leaves in below]
    assert values.node.tolist() == pytest.approx(means)
    assert values.leaves.tolist() == [len(leaves) for leaves in below]
    family = torch.where(tree.parent >= 0, tree.parent, len(tree))
    gain = (values.node - parent_values(tree, values)) * values.leaves
    siblings = sibling_advantage(tree, values)
    for over in family.unique().tolist():
        # Weighted by leaves, gains over the parent cancel; sibling advantages cancel unweighted.
        assert float(gain[family == over].sum()) == pytest.approx(0, abs=1e-9)
        assert float(siblings[family == over].sum()) == pytest.approx(0, abs=1e-9)


def test_depth_one_is_the_group_advantage(toolbox):
    reward, group = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.5]), [7, 7, 7, 9, 9, 9]
    batch = _batch(toolbox, [-1] * 6, [0] * 6, [2, 3, 1, 4, 2, 2], group=group)
    rewards = toolbox.rewards(batch.uid, reward.tolist(), valid=[True, True, True, True, False, True])
    expected = group_advantage(rewards.value, batch.group, rewards.valid, normalize="mean")
    for value in ("leaves", "children"):
        credit = (
            toolbox.start(TreeSiblings, max_probability=1.0, value=value)
            .run(trajectories=batch, rewards=rewards)
            .credit
        )
        assert torch.allclose(credit.advantage.values, batch.response_tokens.spread(expected).values)
        assert bool(credit.mask.values.all())
    # Alone in its tree a leaf has nothing within it.
    leaves = toolbox.start(TreeLeaves, normalize="mean").run(trajectories=batch, rewards=rewards).credit
    assert torch.allclose(leaves.advantage.values, batch.response_tokens.spread(expected).values)
    paths = toolbox.start(TreePaths).run(trajectories=batch, rewards=rewards).credit
    assert torch.allclose(paths.advantage.values, 2 * batch.response_tokens.spread(expected).values)


def test_a_full_tree_has_one_value_whichever_way(toolbox):
    # (2, 3): rows 0 and 3 begin at the prompt, two more leave each after 4 tokens.
    parent, inherited = [-1, 0, 0, -1, 3, 3], [0, 4, 4, 0, 4, 4]
    tree = tree_of(_batch(toolbox, parent, inherited, [6, 7, 5, 6, 6, 9]))
    assert sorted(tree.depth.tolist()) == [1, 1, 2, 2, 2, 2, 2, 2]
    reward, valid = torch.tensor([1.0, 0, 1, 0, 0, 1]), torch.ones(6, dtype=torch.bool)
    leaves, children = (node_values(tree, reward, valid, how) for how in ("leaves", "children"))
    assert torch.allclose(leaves.node, children.node)
    assert torch.allclose(leaves.root, children.root)
    # There V(node) minus the siblings' mean is V(node) − V(parent), the released code's form.
    assert torch.allclose(sibling_advantage(tree, leaves), leaves.node - parent_values(tree, leaves))


def test_every_token_is_trained_once(toolbox):
    rng = random.Random(3)
    for _ in range(10):
        parent, inherited, length, _, valid = _random_tree(rng, 10)
        batch = _batch(toolbox, parent, inherited, length)
        tree = tree_of(batch)
        mask = once_mask(tree, torch.ones(10, dtype=torch.bool))
        # With all rewards valid these are the tokens that each row sampled itself.
        assert int(mask.sum()) == sum(n - k for n, k in zip(length, inherited, strict=True))
        times = torch.zeros(len(tree), dtype=torch.int64)
        sizes = torch.zeros(len(tree), dtype=torch.int64)
        places = tree.spread(torch.arange(len(tree)))
        times.index_add_(0, places, once_mask(tree, torch.tensor(valid)).long())
        sizes.index_add_(0, places, torch.ones_like(places))
        copies = torch.bincount(tree.path.values, minlength=len(tree))
        assert torch.equal(times, sizes // copies)


def test_probable_tokens_are_left_out(toolbox):
    logprob = [[math.log(p) for p in row] for row in ([0.5, 0.95, 0.89], [0.91, 0.2, 1.0])]
    batch = _batch(toolbox, [-1, -1], [0, 0], [3, 3], logprob=logprob)
    rewards = toolbox.rewards(batch.uid, [1, 0])
    assert toolbox.start(TreeSiblings).run(trajectories=batch, rewards=rewards).credit.mask.to_lists() == [
        [True, False, True],
        [False, True, False],
    ]
    node = toolbox.start(TreeSiblings, max_probability=0.1)
    assert not bool(node.run(trajectories=batch, rewards=rewards).credit.mask.values.any())
    assert node.context.metrics["untrained_rows"] == 2
    everything = toolbox.start(TreeSiblings, max_probability=1.0).run(trajectories=batch, rewards=rewards).credit
    assert bool(everything.mask.values.all())


def test_equal_rewards_give_no_signal(toolbox):
    batch = _batch(toolbox, PARENT, INHERITED, LENGTH)
    rewards = toolbox.rewards(batch.uid, [1, 1, 1])
    for kind, settings in ((TreeSiblings, {"max_probability": 1.0}), (TreePaths, {})):
        node = toolbox.start(kind, **settings)
        credit = node.run(trajectories=batch, rewards=rewards).credit
        assert credit.advantage.values.abs().max() == 0
        assert bool(credit.mask.values.any())
        assert node.context.metrics["zero_share"] == 1
    dropped = (
        toolbox.start(TreeSiblings, max_probability=1.0, drop_zero=True).run(trajectories=batch, rewards=rewards).credit
    )
    assert not bool(dropped.mask.values.any())


def test_an_invalid_reward_has_no_part(toolbox):
    batch = _batch(toolbox, PARENT, INHERITED, LENGTH)
    rewards = toolbox.rewards(batch.uid, [float("nan"), 0, 1], valid=[False, True, True])
    credit = toolbox.start(TreeSiblings, max_probability=1.0).run(trajectories=batch, rewards=rewards).credit
    # V(a) = 0 from row 1 alone, V(d) = 1; b has no value. Row 1, the first valid leaf of a, trains it.
    assert credit.advantage.to_lists() == [[0.0] * 5, [-0.5] * 3 + [0.0] * 3, [0.5] * 2]
    assert credit.mask.to_lists() == [[False] * 3 + [True] * 2, [True] * 6, [True] * 2]
    paths = toolbox.start(TreePaths).run(trajectories=batch, rewards=rewards).credit
    # V(root) = 1/2, one valid leaf under a: 2 (0 − 1/2).
    assert paths.advantage.to_lists() == [[0.0] * 5, [-1.0] * 3 + [-0.5] * 3, [1.0] * 2]
    nothing = toolbox.rewards(batch.uid, [1, 1, 1], valid=[False] * 3)
    assert toolbox.start(TreePaths).run(trajectories=batch, rewards=nothing).credit.advantage.values.abs().max() == 0
    assert (
        toolbox.start(TreeSiblings, value="children")
        .run(trajectories=batch, rewards=nothing)
        .credit.advantage.values.abs()
        .max()
        == 0
    )


def test_a_branch_without_tokens_is_still_a_leaf(toolbox):
    # Row 1 inherits 3 tokens of row 0 and adds none: its reward counts in V of what it shares.
    batch = _batch(toolbox, [-1, 0], [0, 3], [5, 3])
    tree = tree_of(batch)
    assert tree.ends.to_lists() == [[3, 5], [3, 3]]
    credit = (
        toolbox.start(TreeSiblings, max_probability=1.0)
        .run(trajectories=batch, rewards=toolbox.rewards(batch.uid, [1, 0]))
        .credit
    )
    assert credit.advantage.to_lists() == [[0.0] * 3 + [0.5] * 2, [0.0] * 3]
    assert credit.mask.to_lists() == [[True] * 5, [False] * 3]


def test_one_chain_and_no_chain(toolbox):
    for kind in (TreeSiblings, TreePaths, TreeLeaves):
        alone = _batch(toolbox, [-1], [0], [4])
        credit = toolbox.start(kind).run(trajectories=alone, rewards=toolbox.rewards(alone.uid, [1])).credit
        assert credit.advantage.values.tolist() == [0.0] * 4
        none = toolbox.trajectories([])
        node = toolbox.start(kind)
        assert len(node.run(trajectories=none, rewards=toolbox.rewards(none.uid, [])).credit) == 0
        assert node.context.metrics["nodes"] == 0
    empty = _batch(toolbox, [-1, -1], [0, 0], [0, 2])
    credit = toolbox.start(TreePaths).run(trajectories=empty, rewards=toolbox.rewards(empty.uid, [1, 0])).credit
    assert credit.advantage.to_lists() == [[], [-1.0, -1.0]]


def test_broken_trees_are_reported(toolbox):
    batch = _batch(toolbox, PARENT, INHERITED, LENGTH)
    with pytest.raises(
        AlignmentError,
        match=r"expected whole trees, but trajectory 1001 continues 1000, which is not in the batch \(1 such rows\)",
    ):
        tree_of(batch.select(torch.tensor([1, 2])))
    with pytest.raises(AlignmentError, match="trajectory 1001 is in another group than the one it continues"):
        tree_of(batch.replace(group=torch.tensor([1, 2, 1])))
    with pytest.raises(
        AlignmentError, match="trajectory 1001 inherits 9 tokens or turns, more than it or the one it continues has"
    ):
        tree_of(batch.replace(inherited=torch.tensor([0, 9, 0])))
    with pytest.raises(ValueError, match=r"expected 0 < max_probability ≤ 1 .* got 0"):
        TreeSiblings.Config(max_probability=0)


def test_long_lineages_do_not_recurse(toolbox):
    count = 1200
    tree = tree_of(_batch(toolbox, list(range(-1, count - 1)), list(range(count)), list(range(1, count + 1))))
    assert int(tree.depth.max()) == count
