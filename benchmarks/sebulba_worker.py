"""Speed of Sebulba on one workload, driven over standard input with the protocol of `peers/README.md`.

`--what train` trains, and goes on by itself between two blocks: whoever drives it stops the process meanwhile
(SIGSTOP), so that the queues are as full at the start of a block as at its end. `--what pieces` measures the parts of
it alone: `go env/B` the environments with random actions, `go infer/B` the acting program, `go learn/B/T` the update.
"""

import argparse
import dataclasses
import functools
import json
from typing import Any

from launch import blocks


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=("train", "pieces"), default="train")
    parser.add_argument("--parts", nargs="+", choices=("env", "infer", "learn"), default=["env", "infer", "learn"])
    parser.add_argument("--env", default="atari/Pong")
    parser.add_argument("--env-options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--network", default="nature", help="tiny, tiny:WIDTH, or a name of podracer's")
    parser.add_argument("--batches", type=int, nargs="+", default=[32], help="environments per actor thread")
    parser.add_argument("--unrolls", type=int, nargs="+", default=[20])
    parser.add_argument("--threads", type=int, default=2, help="actor threads per actor core")
    parser.add_argument("--cores", type=int, default=2, help="virtual cores; a single one acts and learns")
    parser.add_argument("--actor-cores", type=int, default=1)
    parser.add_argument("--lag", default="fixed")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a block, which is whole updates")
    return parser.parse_args()


def network(name: str) -> Any:
    """The recipe; `tiny` exists only here."""
    from podracer import config

    kind, _, width = name.partition(":")
    return tiny(int(width or 64)) if kind == "tiny" else config.network_recipe(name.replace("_", "-"))


def tiny(width: int) -> Any:
    """One dense layer on frames [stack, height, width] averaged over 4 x 4 pixels: as little compute as can be."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from podracer.networks.mlp import linear

    class Pooled(nnx.Module):
        def __init__(self, spec: Any, width: int, rngs: nnx.Rngs):
            stack, height, breadth = spec.shape
            self.dense = linear(stack * (height // 4) * (breadth // 4), width, 2**0.5, rngs)

        def __call__(self, frames: jax.Array) -> jax.Array:
            count, stack, height, breadth = frames.shape
            # By slices: a mean over these axes takes XLA:CPU 80 us for four planes, this 2.
            rows = frames.reshape(count, stack, height // 4, 4, breadth)
            rows = sum(rows[:, :, :, i].astype(jnp.uint16) for i in range(4))
            squares = rows.reshape(count, stack, height // 4, breadth // 4, 4).astype(jnp.float32)
            pooled = sum(squares[..., i] for i in range(4)) / (16 * 255.0)
            return jax.nn.relu(self.dense(pooled.reshape(count, -1)))

    @dataclasses.dataclass(frozen=True)
    class Recipe:
        width: int

        def __call__(self, observation_spec: Any, rngs: nnx.Rngs) -> Pooled:
            return Pooled(observation_spec, self.width, rngs)

    return Recipe(width)


def make_loop(args: argparse.Namespace, batch_size: int, unroll_length: int) -> Any:
    """Sebulba with IMPALA, policy and value on one trunk."""
    from podracer import agents, envs
    from podracer.agents.impala import Config
    from sebulba.lag import Lag
    from sebulba.loop import Sebulba
    from sebulba.topology import split

    env = envs.on_host(envs.make(args.env, **args.env_options), batch_size)
    agent = agents.impala(env.spec, Config(shared_trunk=True), network(args.network))
    topology = split(args.cores, args.actor_cores, args.threads, batch_size)
    return Sebulba(agent, env, topology, unroll_length, Lag.parse(args.lag), stall_timeout_s=blocks.NEVER_S)


def pieces(args: argparse.Namespace) -> dict[str, Any]:
    """What measures the parts, by their names."""
    from sebulba import measure

    measures = {}
    for batch_size in args.batches:
        loops = {length: make_loop(args, batch_size, length) for length in args.unrolls}
        loop = loops[args.unrolls[0]]
        if "env" in args.parts:
            threads = loop.topology.num_threads
            measures[f"env/{batch_size}"] = functools.partial(measure.ceiling, loop.env, threads)
        if "infer" in args.parts:
            measures[f"infer/{batch_size}"] = measure.Inference(loop)
        if "learn" in args.parts:
            measures |= {f"learn/{batch_size}/{length}": measure.Learning(each) for length, each in loops.items()}
    return measures


def main() -> None:
    args = parse_args()
    say = blocks.take_stdout()
    from podracer import mesh

    mesh.start_backend("cpu", args.cores)
    if args.what == "pieces":
        blocks.serve(lambda: pieces(args), vars(args), args.seconds, say)
    else:
        make = lambda: make_loop(args, args.batches[0], args.unrolls[0])
        blocks.serve_sebulba(make, vars(args), args.seconds, say)


if __name__ == "__main__":
    main()
