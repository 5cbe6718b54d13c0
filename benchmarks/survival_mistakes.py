"""Command lines that cannot work: what `podracer` must refuse at once."""

from __future__ import annotations

import itertools
import pathlib

WHOLE = ("0", "-5", "x", "1.5", "nan")  # of a number that counts something
VALUES = {
    "--total-steps": WHOLE,
    "--unroll-length": WHOLE,
    "--batch-per-core": WHOLE,
    "--eval-episodes": WHOLE,
    "--keep": WHOLE,
    "--updates-per-call": WHOLE,
    "--seeds": WHOLE,
    "--cores": WHOLE,
    "--seed": ("-1", "x", "4294967296", "0.5"),
    "--evaluations": ("-1", "x", "0.5"),
    "--checkpoint-every-s": ("-1", "x", "nan", "inf"),
    "--checkpoint-max-age-s": ("-1", "x", "nan"),
    "--nan": ("explode", ""),
    "--env": ("catchh", "nowhere.py:Env", "gymnax/Nothing-v0", ""),
    "--agent": ("pp0", "nowhere.py:agent"),
    "--network": ("mpl", "nowhere.py:Network"),
    "--preset": ("cartpole-pp", "pong-cpu"),
    "--platform": ("gpuu",),
    "--env.rows": ("0", "-3", "x"),
    "--env.colums": ("3",),
    "--agent.learning-rate": ("-1", "nan", "x"),
    "--agent.gamma": ("3", "x"),
    "--network.hidden": ("0", "x"),
    "--starts": ("somewhere",),
    "--prng": ("dice",),
    "--sweep": ("learning_rate=x", "zeta=1,2", "learning_rate"),
    "--batch-per-cor": ("3",),
    "--tensorboard": ("maybe",),
}
SEBULBA = {
    "--actor-cores": ("0", "x", "99"),
    "--threads-per-core": ("0", "-1"),
    "--batch-size": ("0", "x"),
    "--lag": ("sometimes", "fixed:-1", "bounded:0"),
    "--accumulate": ("0",),
    "--learner-splits": ("0", "7"),
    "--stall-timeout": ("0", "x"),
}


def lines(folder: pathlib.Path) -> list[list[str]]:
    """All of them, of different kinds first; `folder` has a directory `taken` and a file `file`."""
    train = ["train", "anakin", "--env", "catch", "--agent", "a2c", "--run", str(folder / "run")]
    sebulba = ["train", "sebulba", "--env", "catch", "--agent", "a2c", "--run", str(folder / "run")]
    found = [[*train, name, values[i]] for i in range(5) for name, values in VALUES.items() if i < len(values)]
    more = [[*sebulba, name, value] for name, values in SEBULBA.items() for value in values]
    taken = [*train[:-1], str(folder / "taken")], [*train[:-1], str(folder / "file" / "below")]
    others = [[name] for name in ("trian", "resume", "eval", "plot", "render", "play")] + [["train", "anakn"]]
    commands = ("resume", "eval", "render", "plot")
    directories = [[command, str(folder / where)] for command in commands for where in ("no", "taken")]
    mixed = itertools.zip_longest(found, [*more, *taken, *others, *directories])
    return [line for pair in mixed for line in pair if line is not None]
