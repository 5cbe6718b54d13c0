"""Speed of Anakin on one workload, driven over standard input with the protocol of `peers/README.md`.

`--what` says what is measured: `env` (random actions: the limit), `act` (the agent acts, nothing learns), or the name
of an agent, for the whole training. In the first two the trajectory is summed up, so that the compiler keeps it.
"""

import argparse
import dataclasses

from launch import blocks

ENVS = {
    "cartpole": ("gymnax/CartPole-v1", "tanh"),
    "breakout": ("gymnax/Breakout-MinAtar", "relu"),
    "catch": ("catch", "relu"),
}
AGENTS = ("a2c", "ppo", "impala")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=tuple(ENVS), default="cartpole")
    parser.add_argument("--what", choices=("env", "act", *AGENTS), default="ppo")
    parser.add_argument("--num-envs", type=int, default=64, help="on all cores together")
    parser.add_argument("--unroll", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--cores", type=int, default=None, help="virtual cores; default: one per physical core")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a timed block; 0: one update per block")
    return parser.parse_args()


def build(args: argparse.Namespace):
    """The agent and the environment."""
    import jax
    import jax.numpy as jnp

    from podracer import agents, envs, networks
    from podracer.types import ActorOutput

    name, activation = ENVS[args.env]
    env = envs.make(name)
    network = networks.mlp((64, 64), activation)
    agent = getattr(agents, args.what if args.what in AGENTS else "a2c")(env.spec, network=network)
    if args.what == "ppo":
        shape = {"epochs": args.epochs, "minibatches": args.minibatches}
        agent = agent.rebuild(dataclasses.replace(agent.config, **shape))
    if args.what in AGENTS:
        return agent, env

    def acts_at_random(params, state, timestep, key):
        draw = jax.random.uniform(key, timestep.first.shape)
        return ActorOutput((draw * env.spec.action.num_values).astype(jnp.int32)), state

    agent = dataclasses.replace(agent, learner_step=sums_up, rebuild=None)
    return dataclasses.replace(agent, actor_step=acts_at_random) if args.what == "env" else agent, env


def sums_up(state, trajectory, key, axis_name):
    """In place of learning: the trajectory is added up, so that the compiler keeps it."""
    import jax
    import jax.numpy as jnp

    return state, {"sum": sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(trajectory))}


def main() -> None:
    args = parse_args()
    say = blocks.take_stdout()
    from podracer import mesh

    mesh.start_backend("cpu", args.cores)
    import jax

    from anakin.loop import Anakin

    def make_loop():
        agent, env = build(args)
        updates = 1 if args.seconds == 0 else 4
        return Anakin(agent, env, args.num_envs // jax.device_count(), args.unroll, updates_per_call=updates)

    blocks.serve_anakin(make_loop, vars(args), args.seconds, say)


if __name__ == "__main__":
    main()
