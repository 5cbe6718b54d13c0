"""PPO on CartPole and MinAtar Breakout, written a second time: what the published configurations reach by themselves.

    python benchmarks/peers/independent_ppo.py --env breakout --seeds 16 --steps 1e6
    python benchmarks/peers/independent_ppo.py --env cartpole --seeds 24 --steps 5e5

Plain JAX, optax and gymnax, nothing of podracer. The configurations are PureJaxRL's; on MinAtar the learning rate falls
over 1e7 steps whatever `--steps` says. As there, a time limit counts as a termination. Prints, for some numbers of
steps, the mean return of the episodes that ended shortly before, with its standard error over the seeds, and what
PureJaxRL plots: the return of each environment's last episode, averaged over steps, in which long episodes weigh
more. A learning check, not a speed check.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={os.cpu_count()}")

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax

DISCOUNT, LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
UNROLL, EPOCHS = 128, 4
REPORT_AT = (2.5e5, 5e5, 1e6, 2e6, 4e6, 1e7)


class Workload(NamedTuple):
    name: str
    num_envs: int
    minibatches: int
    learning_rate: float
    annealed_over: int  # steps
    activation: Any
    window: int  # updates before the one that is reported


WORKLOADS = {
    "breakout": Workload("Breakout-MinAtar", 64, 8, 5e-3, 10_000_000, jax.nn.relu, 10),
    "cartpole": Workload("CartPole-v1", 4, 4, 2.5e-4, 500_000, jnp.tanh, 80),
}


class Batch(NamedTuple):
    observation: Any
    action: Any
    log_prob: Any
    value: Any
    advantage: Any
    target: Any


class Acting(NamedTuple):
    state: Any
    observation: Any
    key: Any
    collected: Any  # [N] reward of the running episodes
    last_return: Any  # [N] of the last episode that ended


def log_prob_of(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]


class Ppo:
    """PPO on one workload."""

    def __init__(self, workload: Workload):
        self.workload, self.batch = workload, workload.num_envs * UNROLL
        self.env, self.env_params = gymnax.make(workload.name)
        updates, per_update = workload.annealed_over // self.batch, workload.minibatches * EPOCHS
        schedule = lambda count: workload.learning_rate * (1 - (count // per_update) / updates)
        self.optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule, eps=1e-5))

    def initial_weights(self, key, inputs):
        """Two perceptrons with two layers of 64."""

        def layers(key, outputs, scale):
            sizes, scales = (inputs, 64, 64, outputs), (2**0.5, 2**0.5, scale)
            keys = jax.random.split(key, 3)
            return [
                (jax.nn.initializers.orthogonal(scales[i])(keys[i], sizes[i : i + 2]), jnp.zeros(sizes[i + 1]))
                for i in range(3)
            ]

        actor, critic = jax.random.split(key)
        return {"actor": layers(actor, self.env.num_actions, 0.01), "critic": layers(critic, 1, 1.0)}

    def forward(self, weights, observation):
        def mlp(layers, x):
            for matrix, bias in layers[:-1]:
                x = self.workload.activation(x @ matrix + bias)
            return x @ layers[-1][0] + layers[-1][1]

        return mlp(weights["actor"], observation), mlp(weights["critic"], observation)[..., 0]

    def act(self, weights, carry: Acting, _):
        """One step of all environments. gymnax resets by itself."""
        size = self.workload.num_envs
        key, action_key, step_key = jax.random.split(carry.key, 3)
        flat = carry.observation.reshape(size, -1)
        logits, value = self.forward(weights, flat)
        action = jax.random.categorical(action_key, logits)
        step = jax.vmap(lambda key, state, action: self.env.step(key, state, action, self.env_params))
        keys = jax.random.split(step_key, size)
        observation, state, reward, terminated, truncated, _ = step(keys, carry.state, action)
        done, collected = terminated | truncated, carry.collected + reward
        last_return = jnp.where(done, collected, carry.last_return)
        carry = Acting(state, observation, key, jnp.where(done, 0.0, collected), last_return)
        return carry, (flat, action, log_prob_of(logits, action), value, reward, done, last_return)

    def advantages(self, value, reward, done, last_value):
        """Generalised advantage estimation."""

        def backwards(carry, step):
            advantage, next_value = carry
            value, reward, done = step
            alive = DISCOUNT * (1 - done)
            advantage = reward + alive * next_value - value + alive * LAMBDA * advantage
            return (advantage, value), advantage

        start = (jnp.zeros_like(last_value), last_value)
        return jax.lax.scan(backwards, start, (value, reward, done), reverse=True)[1]

    def loss(self, weights, batch: Batch):
        logits, value = self.forward(weights, batch.observation)
        ratio = jnp.exp(log_prob_of(logits, batch.action) - batch.log_prob)
        advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
        clipped = batch.value + jnp.clip(value - batch.value, -CLIP, CLIP)
        error = 0.5 * jnp.maximum((value - batch.target) ** 2, (clipped - batch.target) ** 2).mean()
        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
        return policy + VALUE * error - ENTROPY * entropy

    def update(self, carry, _):
        """Act, then learn. Returns, of this update: the sum of returns of ended episodes, their number, and the mean
        over steps and environments of the last return."""
        weights, opt_state, acting = carry
        acting, seen = jax.lax.scan(lambda carry, _: self.act(weights, carry, _), acting, None, UNROLL)
        flat, action, log_prob, value, reward, done, last_return = seen
        last_value = self.forward(weights, acting.observation.reshape(self.workload.num_envs, -1))[1]
        advantage = self.advantages(value, reward, done, last_value)
        whole = Batch(flat, action, log_prob, value, advantage, advantage + value)
        whole = jax.tree.map(lambda leaf: leaf.reshape(self.batch, *leaf.shape[2:]), whole)

        def minibatch(carry, batch):
            weights, opt_state = carry
            changes, opt_state = self.optimizer.update(jax.grad(self.loss)(weights, batch), opt_state, weights)
            return (optax.apply_updates(weights, changes), opt_state), None

        def epoch(carry, key):
            order, parts = jax.random.permutation(key, self.batch), self.workload.minibatches
            shuffled = jax.tree.map(lambda leaf: leaf[order].reshape(parts, -1, *leaf.shape[1:]), whole)
            return jax.lax.scan(minibatch, carry, shuffled)[0], None

        key, *epoch_keys = jax.random.split(acting.key, EPOCHS + 1)
        (weights, opt_state), _ = jax.lax.scan(epoch, (weights, opt_state), jnp.stack(epoch_keys))
        numbers = (last_return * done).sum(), done.sum(), last_return.mean()
        return (weights, opt_state, acting._replace(key=key)), numbers

    def run(self, seed, num_updates):
        key, weights_key, reset_key = jax.random.split(jax.random.key(seed), 3)
        size = self.workload.num_envs
        observation, state = jax.vmap(self.env.reset, (0, None))(jax.random.split(reset_key, size), self.env_params)
        weights = self.initial_weights(weights_key, observation[0].size)
        acting = Acting(state, observation, key, jnp.zeros(size), jnp.zeros(size))
        return jax.lax.scan(self.update, (weights, self.optimizer.init(weights), acting), None, num_updates)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=tuple(WORKLOADS), default="breakout")
    parser.add_argument("--seeds", type=int, default=16, help="how many; a multiple of the number of cores")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=float, default=1e6)
    args = parser.parse_args()
    ppo, cores = Ppo(WORKLOADS[args.env]), jax.local_device_count()
    if args.seeds < 1 or args.seeds % cores or args.steps < ppo.batch:
        parser.error(f"--seeds wants a multiple of {cores}, --steps at least {ppo.batch}")
    num_updates = round(args.steps / ppo.batch)
    seeds = jnp.arange(args.first_seed, args.first_seed + args.seeds).reshape(cores, -1)
    program = jax.pmap(lambda seeds: jax.lax.map(lambda seed: ppo.run(seed, num_updates), seeds))
    totals, counts, latest = (np.asarray(each, np.float64).reshape(args.seeds, -1) for each in program(seeds))
    print("| steps | seeds | mean return | standard error | standard deviation | as PureJaxRL plots it |")
    print("|--:|--:|--:|--:|--:|--:|")
    for steps in [steps for steps in REPORT_AT if round(steps / ppo.batch) <= num_updates] or [args.steps]:
        last = round(steps / ppo.batch)
        window = slice(max(last - ppo.workload.window, 0), last)
        means = totals[:, window].sum(1) / np.maximum(counts[:, window].sum(1), 1)
        spread = means.std(ddof=1) if args.seeds > 1 else float("nan")
        print(
            f"| {steps:.3g} | {args.seeds} | {means.mean():.1f} | {spread / args.seeds**0.5:.1f} | {spread:.1f} | "
            f"{latest[:, last - 1].mean():.1f} |"
        )


if __name__ == "__main__":
    main()
