"""Trajectories of Tinker's cookbook, for tinker_hooks.py and its test."""


def steps(*rows, final=0.0):
    """(what is read, tokens, reward[, masked]) of each action; read are runs of token ids and names of images."""
    names = ("read", "tokens", "reward", "masked")
    return {"steps": [dict(zip(names, row, strict=False)) for row in rows], "final": final}


GROUPS = [
    [
        # The second observation goes on; the second reads the same but has another reward.
        steps(([[5, 6]], [10, 11], 0.25), ([[5, 6, 10, 11, 7]], [12, 13, 14], 1.0)),
        steps(([[5, 6]], [10], 0.0), ([[5, 6, 10, 7]], [12], 0.5), final=0.25),
        # The history is written again; then it goes on.
        steps(([[5, 6]], [11, 11], 0.5), ([[8, 9]], [13], 0.0), ([[8, 9, 13, 7]], [14, 15], 0.75)),
        # The first action could not be parsed.
        steps(([[5, 6]], [15, 15], -0.5, True), ([[5, 6, 15, 15, 7]], [16], 1.0)),
        # The prompt was too long.
        steps(([], [], -1.0)),
    ],
    [
        # An image is read, once another.
        steps(([[5], "red"], [20, 21], 0.0), ([[5], "red", [20, 21], [7]], [22], 1.0)),
        steps(([[5], "blue"], [20, 21], 0.5), ([[5], "blue", [20, 21], [7]], [22], 0.25)),
        # Nothing is read: the first token is no target.
        steps(([], [23, 24, 25], 0.5)),
        steps(([[5], "red"], [26], 1.0, True)),
    ],
]
