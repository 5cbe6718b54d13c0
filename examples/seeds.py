"""Many seeds and learning rates in ONE compiled program, and a picture of what came of it.

python examples/seeds.py
podracer train anakin --env catch --seeds 4 --sweep learning_rate=3e-5,3e-4,3e-3      the same from the shell
"""

from __future__ import annotations

import pathlib
import sys
import time

import anakin
from podracer import agents, envs, plot

RATES = [3e-5, 3e-4, 3e-3]
SEEDS = 4

if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    env = envs.Catch()
    folder = pathlib.Path("runs") / time.strftime("seeds-%Y%m%d-%H%M%S")
    run = anakin.train(
        agents.ppo(env.spec),
        env,
        total_steps=steps,  # of each run
        batch_per_core=16,  # environments of each run
        unroll_length=16,
        seeds=SEEDS,
        sweep={"learning_rate": RATES},
        run_dir=folder,
    )
    returns = run.evaluate(episodes=64).returns.mean(-1).reshape(len(RATES), SEEDS)
    for rate, of_rate in zip(RATES, returns, strict=True):
        print(f"learning rate {rate:g}: mean return {of_rate.mean():.2f}, worst of {SEEDS} seeds {of_rate.min():.2f}")
    plot.plot([folder], folder / "curves.png", title="PPO on Catch")
    print(f"curves: {folder / 'curves.png'}")
