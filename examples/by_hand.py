"""The loop is yours: no settings, no files, just the compiled program and what it says.

python examples/by_hand.py
"""

from __future__ import annotations

import sys

import numpy as np

import anakin
from podracer import agents, envs
from podracer.evaluate import Evaluator

if __name__ == "__main__":
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    env = envs.Catch()
    agent = agents.impala(env.spec)
    loop = anakin.Anakin(agent, env, batch_per_core=64, unroll_length=18, updates_per_call=50)
    evaluate = Evaluator(agent, env, episodes=64)

    state = loop.init(seed=0)
    for call in range(1, calls + 1):
        state, metrics = loop.step(state)  # 50 updates in one call, no host in between; the old state is gone
        episodes = metrics.episodes  # sums over the episodes that ended, one row per update
        mean = float(np.sum(episodes.returns) / np.sum(episodes.count))
        entropy = float(np.mean(metrics.learner["entropy"]))
        print(f"{call * loop.steps_per_call:>9,} steps: return {mean:5.2f}, entropy {entropy:.2f}")
    print(f"greedy: mean return {evaluate(state.learner.params).returns.mean():.2f} of 1")
