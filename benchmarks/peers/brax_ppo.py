"""Speed of brax's PPO on one workload, driven over standard input (see README.md beside this file).

Runs in brax's own virtual environment and imports nothing of podracer. The timed program is brax's own
`ppo.train` without evaluations; blocks are cut at its progress callback.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import os
import resource
import sys
import time
from importlib.metadata import version

ENVS = {
    "cartpole": ("CartPole-v1", "tanh"),
    "breakout": ("Breakout-MinAtar", "relu"),
    "catch": ("Catch-bsuite", "relu"),
}
PACKAGES = ("brax", "gymnax", "jax", "jaxlib", "flax", "optax")
EPOCH_SECONDS = 1.0  # a call of brax's compiled training epoch lasts about this long
NO_END = 1_000_000  # epochs: brax's `train` runs until the driver says "quit"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=tuple(ENVS), default="cartpole")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--unroll", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a timed block")
    parser.add_argument(
        "--cores", default="auto", help="auto: XLA's threads on all cores; N: N cores, N devices (pmap)"
    )
    parser.add_argument("--head", choices=("categorical", "tanh-normal"), default="categorical")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.cores != "auto" and int(args.cores) < 1:
        parser.error("--cores wants 'auto' or a positive number")
    if args.num_envs % args.minibatches:
        parser.error("--minibatches must divide --num-envs: a minibatch of brax consists of whole unrolls")
    return args


def take_stdout():
    """Keep standard output for the protocol alone: whatever libraries print goes to standard error."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def restrict_cores(cores: str) -> int:
    """Apply `--cores` before jax is imported; returns the number of devices to use."""
    if cores == "auto":
        return 1
    count = int(cores)
    allowed = sorted(os.sched_getaffinity(0))
    if count > len(allowed):
        raise SystemExit(f"--cores {count}: this process may use {len(allowed)} only")
    os.sched_setaffinity(0, allowed[:count])
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()
    return count


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def restore_device_put_replicated() -> None:
    """brax 0.14.2 calls `jax.device_put_replicated`, which jax 0.10 no longer has."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def device_put_replicated(tree, devices):
        sharding = NamedSharding(Mesh(np.array(devices), ("i",)), PartitionSpec("i"))
        return jax.tree.map(lambda x: jax.device_put(jnp.stack([x] * len(devices)), sharding), tree)

    if not hasattr(jax, "device_put_replicated"):
        jax.device_put_replicated = device_put_replicated


def make_env(name: str, continuous: bool):
    """A gymnax environment as a brax one, and the length of its episodes."""
    import gymnax
    import jax
    import jax.numpy as jnp
    from brax.envs.base import Env, State

    env, params = gymnax.make(name)

    class GymnaxEnv(Env):
        """Steps without resetting itself: brax's wrappers count, truncate and reset."""

        observation_size = None  # brax's `train` reads the shape of the observation
        action_size = env.num_actions
        backend = "gymnax"

        def reset(self, rng):
            obs, state = env.reset_env(rng, params)
            state = jax.tree.map(jnp.asarray, state)
            zero = jnp.zeros((), jnp.float32)
            return State(state, jnp.ravel(obs).astype(jnp.float32), zero, zero)

        def step(self, state, action):
            action = jnp.argmax(action, axis=-1) if continuous else action
            # A constant key saves brax the draws: none of these environments uses one while an episode lasts.
            key = jax.random.PRNGKey(0)
            obs, inner, reward, terminated, _ = env.step_env(key, state.pipeline_state, action, params)
            inner = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), inner, state.pipeline_state)
            return state.replace(
                pipeline_state=inner,
                obs=jnp.ravel(obs).astype(jnp.float32),
                reward=jnp.asarray(reward, jnp.float32),
                done=jnp.asarray(terminated, jnp.float32),
            )

    return GymnaxEnv(), int(params.max_steps_in_episode)


def make_networks(observation_size, action_size, preprocess_observations_fn, *, activation: str, head: str):
    """brax's network factory: its own two MLPs, with a categorical head in place of the tanh-normal one."""
    import jax
    import jax.numpy as jnp
    from brax.training import distribution, networks
    from brax.training.agents.ppo import networks as ppo_networks
    from flax import linen

    class Categorical:
        scale = jnp.ones(())  # brax's loss logs the moments of a normal distribution

        def __init__(self, logits):
            self.loc = self.logits = logits

        def sample(self, seed):
            return jax.random.categorical(seed, self.logits)

        def mode(self):
            return jnp.argmax(self.logits, axis=-1)

        def log_prob(self, actions):
            log_probs = jax.nn.log_softmax(self.logits)
            return jnp.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]

        def entropy(self):
            log_probs = jax.nn.log_softmax(self.logits)
            return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    class CategoricalDistribution(distribution.ParametricDistribution):
        def __init__(self, actions: int):
            super().__init__(actions, distribution.IdentityPostprocessor(), event_ndims=0, reparametrizable=False)

        def create_dist(self, parameters):
            return Categorical(parameters)

        def log_prob(self, parameters, actions):
            return self.create_dist(parameters).log_prob(actions)

        def entropy(self, parameters, seed):
            return self.create_dist(parameters).entropy()

    shape = {"hidden_layer_sizes": (64, 64), "activation": getattr(linen, activation)}
    if head == "categorical":
        actions = CategoricalDistribution(action_size)
    else:
        actions = distribution.NormalTanhDistribution(action_size)
    # `train` hands over the shape of one observation; the factories want the number of features.
    (features,) = observation_size if isinstance(observation_size, tuple) else (observation_size,)
    inputs = {"obs_size": features, "preprocess_observations_fn": preprocess_observations_fn}
    return ppo_networks.PPONetworks(
        policy_network=networks.make_policy_network(actions.param_size, **inputs, **shape),
        value_network=networks.make_value_network(**inputs, **shape),
        parametric_action_distribution=actions,
    )


class Stop(Exception):
    """Leaves brax's `train` from inside its progress callback."""


class Trainer:
    """brax's `train` on one workload."""

    def __init__(self, args: argparse.Namespace):
        name, activation = ENVS[args.env]
        self.args = args
        self.env, self.episode_length = make_env(name, continuous=args.head == "tanh-normal")
        self.network_factory = functools.partial(make_networks, activation=activation, head=args.head)
        self.steps_per_iteration = args.num_envs * args.unroll

    def train(self, iterations: int, on_epoch) -> None:
        """Trains in epochs of `iterations` until `on_epoch` (called after each, when it is done) raises Stop."""
        from brax.training.agents.ppo import train as ppo

        args = self.args
        with contextlib.suppress(Stop):
            ppo.train(
                environment=self.env,
                num_timesteps=iterations * self.steps_per_iteration * NO_END,
                num_evals=NO_END + 1,
                run_evals=False,
                num_eval_envs=1,
                progress_fn=lambda *_: on_epoch(),
                episode_length=self.episode_length,
                num_envs=args.num_envs,
                unroll_length=args.unroll,
                batch_size=args.num_envs // args.minibatches,
                num_minibatches=args.minibatches,
                num_updates_per_batch=args.epochs,
                network_factory=self.network_factory,
                normalize_observations=False,
                learning_rate=2.5e-4,
                entropy_cost=0.01,
                discounting=0.99,
                gae_lambda=0.95,
                clipping_epsilon=0.2,
                max_grad_norm=0.5,
                seed=args.seed,
            )


def calibrate(trainer: Trainer, limit: float) -> tuple[float, float]:
    """Seconds until the first iteration is done, bar the iteration itself, and seconds per later iteration."""
    import jax

    importlib.import_module("brax.training.agents.ppo.train")
    jax.block_until_ready(jax.random.PRNGKey(0))  # imports and the start of the backend are not compilation
    times = [time.perf_counter()]

    def on_epoch():
        times.append(time.perf_counter())
        if len(times) > 4 and times[-1] - times[2] > limit:
            raise Stop

    trainer.train(1, on_epoch)
    per_iteration = min(b - a for a, b in itertools.pairwise(times[1:]))
    return times[1] - times[0] - per_iteration, per_iteration


def main() -> None:
    args = parse_args()
    channel = take_stdout()
    devices = restrict_cores(args.cores)
    restore_device_put_replicated()

    trainer = Trainer(args)
    compile_s, per_iteration = calibrate(trainer, limit=min(1.0, args.seconds))
    iterations = max(1, round(min(EPOCH_SECONDS, args.seconds) / per_iteration))

    times = [time.perf_counter()]
    epochs = 0  # of a block; 0 while warming up
    left = 0
    cpu = 0.0

    def wait_for_go() -> None:
        nonlocal left, cpu
        for line in sys.stdin:
            if line.strip() == "go":
                left, cpu = epochs, cpu_seconds()
                times.append(time.perf_counter())
                return
            if line.strip() == "quit":
                break
        raise Stop

    def on_epoch() -> None:
        nonlocal left, epochs
        now = time.perf_counter()
        if not epochs:
            times.append(now)
            if len(times) < 5:  # compilation in the first, perhaps a second one, then two in earnest
                return
            per_epoch = min(times[3] - times[2], times[4] - times[3])
            epochs = max(1, round(args.seconds / per_epoch))
            config = {
                **vars(args),
                "peer": "brax",
                "devices": devices,
                "iterations": iterations * epochs,
                "versions": {name: version(name) for name in PACKAGES},
            }
            print(json.dumps({"ready": True, "compile_s": round(compile_s, 3), "config": config}), file=channel)
            wait_for_go()
            return
        left -= 1
        if left:
            return
        seconds, used = now - times[-1], cpu_seconds() - cpu
        steps = epochs * iterations * trainer.steps_per_iteration
        result = {"steps": steps, "seconds": seconds, "steps_per_s": steps / seconds, "cpu_seconds": used}
        print(json.dumps(result), file=channel)
        wait_for_go()

    trainer.train(iterations, on_epoch)


if __name__ == "__main__":
    main()
