"""Speed of rejax's PPO on one workload, driven over standard input (see README.md beside this file).

Runs in rejax's own virtual environment and imports nothing of podracer. The timed program is rejax's own
`PPO.train_iteration` inside one jitted loop, as in its `train` but without the evaluations in between.
"""

import argparse
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
PACKAGES = ("rejax", "gymnax", "jax", "jaxlib", "flax", "optax", "distrax")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=tuple(ENVS), default="cartpole")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--unroll", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a timed block")
    parser.add_argument("--iterations", type=int, default=0, help="iterations in a block (0: calibrate to --seconds)")
    parser.add_argument(
        "--cores", default="auto", help="auto: XLA's threads on all cores; N: N cores, one agent on each"
    )
    parser.add_argument(
        "--phase", choices=("train", "rollout"), default="train", help="rollout: acting only, no updates"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.cores != "auto" and int(args.cores) < 1:
        parser.error("--cores wants 'auto' or a positive number")
    if args.num_envs * args.unroll % args.minibatches:
        parser.error("--minibatches must divide --num-envs * --unroll")
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


def build(args: argparse.Namespace):
    """rejax's PPO with exactly the requested configuration."""
    import gymnax
    from gymnax.wrappers.compat import LegacyStepAPIWrapper
    from rejax import PPO

    class FiveValueEnv(LegacyStepAPIWrapper):
        """gymnax 1.x returns six values from `step`, rejax 0.1.3 expects five.

        `PPO.create` copies its arguments, at which gymnax's wrapper alone recurses without end.
        """

        def __deepcopy__(self, memo):
            return self

    name, activation = ENVS[args.env]
    env, params = gymnax.make(name)
    return PPO.create(
        env=FiveValueEnv(env),
        env_params=params,
        agent_kwargs={"hidden_layer_sizes": (64, 64), "activation": activation},
        num_envs=args.num_envs,
        num_steps=args.unroll,
        num_epochs=args.epochs,
        num_minibatches=args.minibatches,
        learning_rate=2.5e-4,
        max_grad_norm=0.5,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        vf_coef=0.5,
        ent_coef=0.01,
    )


def compile_block(args: argparse.Namespace, devices: int):
    """Returns `run(iterations)`, which trains that long and blocks until it is done, and the seconds to get there."""
    import jax

    algorithm = build(args)
    key = jax.block_until_ready(jax.random.PRNGKey(args.seed))
    start = time.perf_counter()  # imports and the start of the backend are behind us

    def train(state, iterations):
        return jax.lax.fori_loop(0, iterations, lambda _, s: algorithm.train_iteration(s), state)

    def rollout(carry, iterations):
        # The trajectories are part of the carry, so that the compiler cannot drop what nobody reads.
        return jax.lax.fori_loop(0, iterations, lambda _, c: algorithm.collect_trajectories(c[0]), carry)

    def init(key):
        state = algorithm.init_state(key)
        if args.phase == "train":
            return state
        shapes = jax.eval_shape(lambda s: algorithm.collect_trajectories(s)[1], state)
        return state, jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes)

    loop = train if args.phase == "train" else rollout
    if devices == 1:
        state = jax.jit(init)(key)
        step = jax.jit(loop, donate_argnums=0).lower(state, 1).compile()
    else:
        # What rejax offers for several devices: independent agents, one on each.
        state = jax.pmap(init)(jax.random.split(key, devices))
        step = jax.pmap(loop, in_axes=(0, None), donate_argnums=0).lower(state, 1).compile()
    compile_s = time.perf_counter() - start

    def run(iterations: int) -> None:
        nonlocal state
        state = jax.block_until_ready(step(state, iterations))

    return run, compile_s


def main() -> None:
    args = parse_args()
    channel = take_stdout()
    devices = restrict_cores(args.cores)

    run, compile_s = compile_block(args, devices)
    run(1)
    iterations = args.iterations
    if not iterations:
        iterations, elapsed = 1, 0.0
        while True:  # grow the probe until it is long enough to trust
            start = time.perf_counter()
            run(iterations)
            elapsed = time.perf_counter() - start
            if elapsed >= min(1.0, args.seconds):
                break
            iterations *= 2
        iterations = max(1, round(iterations * args.seconds / elapsed))
    steps = iterations * args.num_envs * args.unroll * devices

    config = {
        **vars(args),
        "peer": "rejax",
        "agents": devices,
        "iterations": iterations,
        "versions": {name: version(name) for name in PACKAGES},
    }
    print(json.dumps({"ready": True, "compile_s": round(compile_s, 3), "config": config}), file=channel)

    for line in sys.stdin:
        command = line.strip()
        if command == "quit":
            break
        if command != "go":
            continue
        cpu, start = cpu_seconds(), time.perf_counter()
        run(iterations)
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        result = {"steps": steps, "seconds": seconds, "steps_per_s": steps / seconds, "cpu_seconds": cpu}
        print(json.dumps(result), file=channel)


if __name__ == "__main__":
    main()
