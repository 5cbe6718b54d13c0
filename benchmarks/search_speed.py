"""Speed of the tree search against mctx and against the model alone: prints one table.

    python benchmarks/search_speed.py
    python benchmarks/search_speed.py --sizes 64x16x18 --rounds 9
    python benchmarks/search_speed.py --model convolutional --sizes 64x16x18 64x50x18
    python benchmarks/search_speed.py --cores all --sizes 256x50x18
    python benchmarks/search_speed.py --agree

Rows: MuZero's and Gumbel MuZero's search here and in mctx, Gumbel's with whole rounds at once, and the model alone (as
many calls, one after the other, and no tree: the limit of a search that makes one call per simulation). The model is a
network of two layers of 64, or a residual block on 6 x 6 x 64. All run in this process, on one core unless it is told
`--cores all`, and take turns; the numbers are medians. CPU time hardly depends on what else the machine does, wall time
does. `--agree` adds how often rounds choose mctx's action, and what that costs, on random decision processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import mctx
import numpy as np
from table_head import where_and_when

from muzero import search
from podracer import mesh
from tests.muzero.search import models

HIDDEN = 64


class Size(NamedTuple):
    batch: int
    sims: int
    actions: int


SIZES = (
    *(Size(batch, sims, 18) for batch in (64, 256) for sims in (16, 32, 50)),
    Size(64, 128, 82),
)


class Row(NamedTuple):
    """One search: its name, the row that it is compared with, and the policy."""

    name: str
    rival: str
    run: Callable[..., Any]


def model_alone(weights: Any, key: Any, root: Any, recurrent_fn: Callable, sims: int) -> Any:
    """The same calls of the model, in a chain."""

    def body(index, carry):
        embedding, total = carry
        action = jnp.full(total.shape, index % root.prior_logits.shape[1])
        output, embedding = recurrent_fn(weights, key, action, embedding)
        return embedding, total + output.value + output.reward + output.discount + output.prior_logits.sum(1)

    return jax.lax.fori_loop(0, sims, body, (root.embedding, root.value))[1]


def weights_of(policy: Callable, **options: Any) -> Callable:
    """What training needs of a search; the tree stays inside the program."""

    def run(*args):
        output = policy(*args, **options)
        return output.action, output.action_weights, output.search_tree.summary().value

    return run


ROWS = (
    Row("model alone", "", model_alone),
    Row("MuZero, mctx", "", weights_of(mctx.muzero_policy)),
    Row("MuZero", "MuZero, mctx", weights_of(search.muzero_policy)),
    Row("Gumbel, mctx", "", weights_of(mctx.gumbel_muzero_policy)),
    Row("Gumbel", "Gumbel, mctx", weights_of(search.gumbel_muzero_policy)),
    Row("Gumbel in rounds", "Gumbel, mctx", weights_of(search.gumbel_muzero_policy, mode="rounds")),
)


class Model(NamedTuple):
    """A model to search with: what makes its weights and roots, and its recurrent function."""

    weights: Callable[[int, int, int], Any]
    root: Callable[[Any, int, int], Any]
    step: Callable[..., Any]


MODELS = {
    "mlp": Model(models.network, models.network_root, models.network_step),
    "convolutional": Model(models.convolutional, models.convolutional_root, models.convolutional_step),
}


def measure(size: Size, model: Model, rounds: int) -> list[str]:
    """The table's lines of one size."""
    weights = model.weights(0, size.actions, HIDDEN)
    root = model.root(weights, 1, size.batch)
    key = jax.random.PRNGKey(0)
    programs, compile_s = {}, {}
    for row in ROWS:
        start = time.perf_counter()
        run = jax.jit(partial(lambda row, *args: row.run(*args, model.step, size.sims), row))
        programs[row.name] = run.lower(weights, key, root).compile()
        compile_s[row.name] = time.perf_counter() - start
        jax.block_until_ready(programs[row.name](weights, key, root))
    cpu_ms = {row.name: [] for row in ROWS}
    wall_ms = {row.name: [] for row in ROWS}
    for _ in range(rounds):
        for name, program in programs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(weights, key, root))
            cpu_ms[name].append(1e3 * (time.process_time() - cpu))
            wall_ms[name].append(1e3 * (time.perf_counter() - wall))
    return [_line(size, row, cpu_ms, wall_ms, compile_s[row.name]) for row in ROWS]


def _line(size: Size, row: Row, cpu_ms: dict, wall_ms: dict, compile_s: float) -> str:
    cpu, wall = statistics.median(cpu_ms[row.name]), statistics.median(wall_ms[row.name])
    low, _, high = statistics.quantiles(cpu_ms[row.name], n=4)
    times = f"{statistics.median(cpu_ms[row.rival]) / cpu:.1f}" if row.rival else ""
    share = statistics.median(cpu_ms["model alone"]) / cpu
    sims = size.batch * size.sims / cpu * 1e3
    shape = f"{size.batch} x {size.sims} x {size.actions}"
    return (
        f"| {shape:13} | {row.name:16} | {cpu:9.2f} | {(high - low) / cpu:6.0%} | {wall:9.2f} | {sims:12,.0f} | "
        f"{times:>6} | {share:8.0%} | {compile_s:9.1f} |"
    )


def agreement(sims: int, batch: int = 400, actions: int = 18, trials: int = 8) -> str:
    """How often rounds take mctx's action, and the regret of both, on random decision processes.

    The values are exact (value iteration) with noise of standard deviation 0.3 on what the model says; the prior knows
    nothing. Regret: the best action's value minus the chosen one's.
    """
    rounds = partial(search.gumbel_muzero_policy, mode="rounds")
    policies = [
        jax.jit(partial(policy, recurrent_fn=models.table_step, num_simulations=sims))
        for policy in (rounds, mctx.gumbel_muzero_policy)
    ]
    same, regrets = [], [[], []]
    for seed in range(trials):
        model = models.table(seed, batch, actions, (0.9,))
        value = np.zeros(batch)
        for _ in range(200):
            q = model.reward + model.discount * value[model.following]
            value = q.max(1)
        noise = np.random.default_rng(seed).normal(0, 0.3, batch)
        model = model._replace(value=(value + noise).astype(np.float32), logits=np.zeros_like(model.logits))
        model = jax.tree.map(jnp.asarray, model)
        root = models.table_root(model, np.arange(batch))
        chosen = [np.asarray(policy(model, jax.random.PRNGKey(seed), root).action) for policy in policies]
        same.append(np.mean(chosen[0] == chosen[1]))
        for regret, action in zip(regrets, chosen, strict=True):
            regret.append(np.mean(value - q[np.arange(batch), action]))
    return (
        f"| {sims:11} | {np.mean(same):11.1%} | {np.mean(regrets[0]):16.3f} | {np.mean(regrets[1]):14.3f} | "
        f"{np.std(np.subtract(*regrets)) / np.sqrt(trials):.3f} |"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=[], metavar="BxSxA", help="batch x simulations x actions")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each row")
    parser.add_argument("--model", choices=MODELS, default="mlp", help="the network that is searched with")
    parser.add_argument("--cores", choices=("one", "all"), default="one", help="pin the process to a core, or not")
    parser.add_argument("--agree", action="store_true", help="compare the choices of rounds with mctx's instead")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.cores == "one" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    mesh.start_backend("cpu", 1)
    print(where_and_when(["python", *sys.argv]))
    if args.agree:
        print("\n| simulations | same action | regret in rounds | regret of mctx | standard error of the difference |")
        print("|------------:|------------:|-----------------:|---------------:|---:|")
        for sims in (16, 32, 50):
            print(agreement(sims), flush=True)
        return
    print(f"\n| {'B x S x A':13} | {'row':16} |    CPU ms | spread |   wall ms |   sims/CPU-s", end=" | ")
    print("x mctx | of limit | compile s |")
    print(f"|{'-' * 15}|{'-' * 18}|----------:|-------:|----------:|-------------:|-------:|---------:|----------:|")
    for size in [Size(*map(int, text.split("x"))) for text in args.sizes] or SIZES:
        print("\n".join(measure(size, MODELS[args.model], args.rounds)), flush=True)


if __name__ == "__main__":
    main()
