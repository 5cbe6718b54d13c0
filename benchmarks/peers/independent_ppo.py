"""PPO on MinAtar Breakout, written a second time: what the published configuration reaches without podracer's code.

    python benchmarks/peers/independent_ppo.py --seeds 16 --steps 1e6

Plain JAX, optax and gymnax, nothing of podracer. The configuration is PureJaxRL's for MinAtar, whose learning rate
falls over 1e7 steps whatever `--steps` says. Prints, for some numbers of steps, the mean return of the episodes that
ended in the ten updates before, with its standard error over the seeds. A learning check, not a speed check.
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

NUM_ENVS, UNROLL, MINIBATCHES, EPOCHS = 64, 128, 8, 4
BATCH = NUM_ENVS * UNROLL
DISCOUNT, LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
LEARNING_RATE, ANNEALED_OVER = 5e-3, 10_000_000 // BATCH
REPORT_AT = (2.5e5, 5e5, 1e6, 2e6, 4e6, 1e7)

env, env_params = gymnax.make("Breakout-MinAtar")
optimizer = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adam(lambda count: LEARNING_RATE * (1 - (count // (MINIBATCHES * EPOCHS)) / ANNEALED_OVER), eps=1e-5),
)


class Batch(NamedTuple):
    observation: Any
    action: Any
    log_prob: Any
    value: Any
    advantage: Any
    target: Any


def initial_weights(key):
    """Two perceptrons, 400-64-64-outputs."""

    def layers(key, outputs, scale):
        sizes, scales = (400, 64, 64, outputs), (2**0.5, 2**0.5, scale)
        keys = jax.random.split(key, 3)
        return [
            (jax.nn.initializers.orthogonal(scales[i])(keys[i], sizes[i : i + 2]), jnp.zeros(sizes[i + 1]))
            for i in range(3)
        ]

    actor, critic = jax.random.split(key)
    return {"actor": layers(actor, 3, 0.01), "critic": layers(critic, 1, 1.0)}


def forward(weights, observation):
    def mlp(layers, x):
        for matrix, bias in layers[:-1]:
            x = jax.nn.relu(x @ matrix + bias)
        return x @ layers[-1][0] + layers[-1][1]

    return mlp(weights["actor"], observation), mlp(weights["critic"], observation)[..., 0]


def log_prob_of(logits, action):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]


def act(weights, carry, _):
    """One step of all environments. gymnax resets by itself."""
    state, observation, key, episode_return = carry
    key, action_key, step_key = jax.random.split(key, 3)
    flat = observation.reshape(NUM_ENVS, -1)
    logits, value = forward(weights, flat)
    action = jax.random.categorical(action_key, logits)
    step = jax.vmap(lambda key, state, action: env.step(key, state, action, env_params))
    observation, state, reward, terminated, truncated, _ = step(jax.random.split(step_key, NUM_ENVS), state, action)
    done = terminated | truncated
    episode_return = episode_return + reward
    carry = (state, observation, key, jnp.where(done, 0.0, episode_return))
    return carry, (flat, action, log_prob_of(logits, action), value, reward, done, episode_return)


def advantages(value, reward, done, last_value):
    """Generalised advantage estimation."""

    def backwards(carry, step):
        advantage, next_value = carry
        value, reward, done = step
        alive = DISCOUNT * (1 - done)
        advantage = reward + alive * next_value - value + alive * LAMBDA * advantage
        return (advantage, value), advantage

    start = (jnp.zeros(NUM_ENVS), last_value)
    return jax.lax.scan(backwards, start, (value, reward, done), reverse=True)[1]


def loss(weights, batch: Batch):
    logits, value = forward(weights, batch.observation)
    ratio = jnp.exp(log_prob_of(logits, batch.action) - batch.log_prob)
    advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
    policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    clipped = batch.value + jnp.clip(value - batch.value, -CLIP, CLIP)
    error = 0.5 * jnp.maximum((value - batch.target) ** 2, (clipped - batch.target) ** 2).mean()
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    return policy + VALUE * error - ENTROPY * entropy


def update(carry, _):
    """Act, then learn: returns the sum of the returns of the episodes that ended, and their number."""
    weights, opt_state, state, observation, key, episode_return = carry
    acting = (state, observation, key, episode_return)
    acting, seen = jax.lax.scan(lambda carry, _: act(weights, carry, _), acting, None, UNROLL)
    state, observation, key, episode_return = acting
    flat, action, log_prob, value, reward, done, returned = seen
    advantage = advantages(value, reward, done, forward(weights, observation.reshape(NUM_ENVS, -1))[1])
    whole = Batch(flat, action, log_prob, value, advantage, advantage + value)
    whole = jax.tree.map(lambda leaf: leaf.reshape(BATCH, *leaf.shape[2:]), whole)

    def minibatch(carry, batch):
        weights, opt_state = carry
        changes, opt_state = optimizer.update(jax.grad(loss)(weights, batch), opt_state, weights)
        return (optax.apply_updates(weights, changes), opt_state), None

    def epoch(carry, key):
        order = jax.random.permutation(key, BATCH)
        shuffled = jax.tree.map(lambda leaf: leaf[order].reshape(MINIBATCHES, -1, *leaf.shape[1:]), whole)
        return jax.lax.scan(minibatch, carry, shuffled)[0], None

    key, *epoch_keys = jax.random.split(key, EPOCHS + 1)
    (weights, opt_state), _ = jax.lax.scan(epoch, (weights, opt_state), jnp.stack(epoch_keys))
    return (weights, opt_state, state, observation, key, episode_return), ((returned * done).sum(), done.sum())


def run(seed, num_updates):
    key, weights_key, reset_key = jax.random.split(jax.random.key(seed), 3)
    weights = initial_weights(weights_key)
    observation, state = jax.vmap(env.reset, (0, None))(jax.random.split(reset_key, NUM_ENVS), env_params)
    carry = (weights, optimizer.init(weights), state, observation, key, jnp.zeros(NUM_ENVS))
    return jax.lax.scan(update, carry, None, num_updates)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=16, help="how many; a multiple of the number of cores")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=float, default=1e6)
    args = parser.parse_args()
    cores = jax.local_device_count()
    if args.seeds < 1 or args.seeds % cores or args.steps < BATCH:
        parser.error(f"--seeds wants a multiple of {cores}, --steps at least {BATCH}")
    num_updates = round(args.steps / BATCH)
    seeds = jnp.arange(args.first_seed, args.first_seed + args.seeds).reshape(cores, -1)
    program = jax.pmap(lambda seeds: jax.lax.map(lambda seed: run(seed, num_updates), seeds))
    totals, counts = (np.asarray(each, np.float64).reshape(args.seeds, -1) for each in program(seeds))
    print("| steps | seeds | mean return | standard error | standard deviation |\n|--:|--:|--:|--:|--:|")
    for steps in [steps for steps in REPORT_AT if round(steps / BATCH) <= num_updates] or [args.steps]:
        last = round(steps / BATCH)
        window = slice(max(last - 10, 0), last)
        means = totals[:, window].sum(1) / np.maximum(counts[:, window].sum(1), 1)
        spread = means.std(ddof=1) if args.seeds > 1 else float("nan")
        print(f"| {steps:.3g} | {args.seeds} | {means.mean():.1f} | {spread / args.seeds**0.5:.1f} | {spread:.1f} |")


if __name__ == "__main__":
    main()
