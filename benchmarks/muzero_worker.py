"""Speed of MuZero on one workload, driven over standard input with the protocol of `peers/README.md`.

`--part` says what is measured: `train`, the whole; `act`, acting alone (trajectories are added up); `model`, acting
with as many calls of the model as the search makes, one after the other, and no search (the limit of acting); `learn`,
the whole with random actions in place of the search. On Sebulba only `train`.
"""

import argparse
import dataclasses
from typing import Any

from anakin_worker import sums_up

from launch import blocks

PARTS = ("train", "act", "model", "learn")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=("anakin", "sebulba"), default="anakin")
    parser.add_argument("--part", choices=PARTS, default="train")
    parser.add_argument("--env", default="cartpole")
    parser.add_argument("--agent", choices=("muzero", "gumbel-muzero"), default="gumbel-muzero")
    parser.add_argument("--search", default="fast", help="fast, rounds or mctx")
    parser.add_argument("--simulations", type=int, default=50)
    parser.add_argument("--num-envs", type=int, default=256, help="on all cores, or all threads, together")
    parser.add_argument("--unroll", type=int, default=32)
    parser.add_argument("--cores", type=int, default=2, help="virtual cores")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a block")
    return parser.parse_args()


def make_agent(args: argparse.Namespace, env: Any) -> Any:
    """The agent, or the part of it that is measured. Layers of 64, 256 starts per gradient step, replay ratio 1."""
    import muzero

    maker, config = {
        "muzero": (muzero.muzero, muzero.Config),
        "gumbel-muzero": (muzero.gumbel_muzero, muzero.GumbelConfig),
    }[args.agent]
    settings = {"num_simulations": args.simulations, "search": args.search, "sequence_length": args.unroll}
    settings |= {"min_replay": 1, "replay_steps": max(65_536 // args.cores, 2 * args.unroll * args.num_envs)}
    agent = maker(env.spec, config(**settings))
    if args.part in ("act", "model"):
        agent = dataclasses.replace(agent, learner_step=sums_up, rebuild=None)
    if args.part in ("model", "learn"):
        agent = dataclasses.replace(agent, actor_step=without_search(args, agent, env), rebuild=None)
    return agent


def without_search(args: argparse.Namespace, agent: Any, env: Any) -> Any:
    """An actor that draws actions at random, after `--simulations` calls of the model where that is the part."""
    import jax
    import jax.numpy as jnp

    from muzero.agent import Notes
    from muzero.model import Heads
    from podracer.networks.functional import functional
    from podracer.types import ActorOutput

    config, num_actions = agent.config, env.spec.action.num_values
    heads = Heads(config.value_bins, config.reward_bins)
    network = functional(lambda rngs: agent.network(env.spec, heads, rngs))

    def chain(module, observation):
        latent = module.represent(observation)
        prediction = module.predict(latent)

        def body(index, carry):
            latent, total = carry
            latent, reward = module.step(latent, jnp.full(total.shape, index % num_actions))
            policy, value = module.predict(latent)
            return latent, total + policy.sum(-1) + value.sum(-1) + reward.sum(-1)

        total = prediction.policy.sum(-1)
        return jax.lax.fori_loop(0, args.simulations, body, (latent, total))[1]

    def act(params, state, timestep, key):
        size = timestep.first.shape[0]
        value = jnp.zeros(size)
        if args.part == "model":
            value = network.apply(params.weights, chain, timestep.observation)
        action = jax.random.randint(key, (size,), 0, num_actions)
        notes = Notes(jnp.full((size, num_actions), 1.0 / num_actions), value, jnp.zeros(size), jnp.zeros(size, bool))
        return ActorOutput(action, notes), state

    return act


def main() -> None:
    args = parse_args()
    say = blocks.take_stdout()
    from podracer import mesh

    mesh.start_backend("cpu", args.cores)
    from podracer import envs

    env = envs.make(args.env)
    if args.architecture == "anakin":
        from anakin.loop import Anakin

        per_core = args.num_envs // args.cores
        make = lambda: Anakin(make_agent(args, env), env, per_core, args.unroll, updates_per_call=1)
        blocks.serve_anakin(make, vars(args), args.seconds, say)
        return
    from sebulba.lag import Lag
    from sebulba.loop import Sebulba
    from sebulba.topology import split

    threads = 2
    host = envs.on_host(env, args.num_envs // threads)
    topology = split(args.cores, 1, threads, args.num_envs // threads)
    make = lambda: Sebulba(
        make_agent(args, env), host, topology, args.unroll, Lag.parse("fixed"), stall_timeout_s=blocks.NEVER_S
    )
    blocks.serve_sebulba(make, vars(args), args.seconds, say)


if __name__ == "__main__":
    main()
