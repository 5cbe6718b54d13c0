"""AlphaZero: what the search makes of the true game, against tic-tac-toe solved by brute force."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muzero
from muzero import planning, players, search, targets
from muzero.alphazero import Node, environment_model, stepper
from podracer import envs
from podracer.errors import UserError
from podracer.specs import STATE
from podracer.types import TimeStep
from tests.contracts.agents import SPECS, Bench, Case, fast_jit
from tests.contracts.agents import bench as contract_bench

pytestmark = pytest.mark.loose_rank  # pgx and mctx broadcast arrays of different rank

ENV = envs.with_state(envs.make("pgx/tic_tac_toe"))
POWERS = 3 ** np.arange(9)


@functools.cache
def positions(count=96, seed=0):
    """`(observations [P], position numbers [P])` along random games, none of them over."""
    rng, lines = np.random.default_rng(seed), []
    step = fast_jit(jax.vmap(lambda state, action: ENV.step(state, action, jax.random.key(0))))
    state, seen = jax.vmap(ENV.reset)(jax.random.split(jax.random.key(seed), count))
    keep = rng.integers(0, 8, count)
    kept, alive = seen, np.ones(count, bool)
    for number in range(7):
        mask = np.asarray(seen["action_mask"])
        action = np.array([rng.choice(np.flatnonzero(row)) for row in mask], np.int32)
        state, out = step(state, action)
        alive &= ~np.asarray(out.terminated)
        seen, take = out.observation, alive & (number < keep)
        kept = jax.tree.map(functools.partial(_where, take), seen, kept)
        lines.append(take.sum())
    assert lines[0] > 50 and lines[-1] > 0
    return kept, numbers(kept)


def _where(take, new, old):
    return np.where(take.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def numbers(seen):
    planes = np.asarray(seen["observation"], int).reshape(-1, 9, 2)
    return (planes[..., 0] + 2 * planes[..., 1]) @ POWERS


def judged(discount, judge):
    """`(root, recurrent_fn)` for `positions()`, without a network."""
    seen, _ = positions()
    size = len(seen["action_mask"])
    root = search.RootFnOutput(
        prior_logits=jnp.zeros((size, 9)),
        value=jnp.zeros(size),
        embedding=Node(seen[STATE], jnp.zeros(size, bool)),
    )
    return root, stepper(ENV.spec, discount, judge), ~np.asarray(seen["action_mask"])


def solved(params, key, seen):
    """The exact value of each position, and no idea of where to go."""
    planes = seen["observation"].astype(jnp.int32).reshape(-1, 9, 2)
    number = jnp.sum((planes[..., 0] + 2 * planes[..., 1]) * POWERS, -1)
    logits = jnp.where(seen["action_mask"], 0.0, -1e9)
    return logits, jnp.asarray(players.tic_tac_toe()[0], jnp.float32)[number]


def chosen(rule, root, recurrent, invalid):
    """The moves [P] of a search without noise."""
    if rule == "gumbel":
        plan = functools.partial(search.gumbel_muzero_policy, gumbel_scale=0.0)
    else:
        plan = functools.partial(search.muzero_policy, dirichlet_fraction=0.0, temperature=0.0)
    run = fast_jit(lambda key: plan((), key, root, recurrent, 40, invalid_actions=invalid).action)
    return np.asarray(run(jax.random.key(0)))


@pytest.mark.parametrize("rule", ["gumbel", "puct"])
def test_with_exact_values_moves_are_perfect(rule):
    """But for one in a hundred: the search's values are means, over the other's mistakes too.

    With the sign of the discount turned they are not: what is good for one is bad for the other.
    """
    _, number = positions()
    best = players.tic_tac_toe()[1][number]
    shares = []
    for discount in (-1.0, 1.0):
        action = chosen(rule, *judged(discount, solved))
        shares.append(best[np.arange(len(best)), action].mean())
    assert shares[0] > 0.98 and shares[1] < 0.8


def test_random_games_find_forced_wins_and_avoid_forced_losses():
    """Monte Carlo tree search against the solution, on all positions where moves differ in value."""
    seen, number = positions()
    best, size = players.tic_tac_toe()[1][number], len(number)
    differ = (best != np.asarray(seen["action_mask"])).any(-1)
    assert differ.sum() > 20
    now = TimeStep(seen, jnp.zeros(size), jnp.ones(size), jnp.zeros(size, bool), jnp.ones(size, bool))
    action, _ = fast_jit(players.mcts(ENV.spec, 300).act)((), (), now, jax.random.key(0))
    assert best[np.arange(size), action][differ].mean() > 0.9


def test_the_step_is_exact_at_the_end_and_nothing_comes_after_it():
    """X on 0 and 1 to move: 2 wins. The loser's next move earns nothing."""
    state, _ = ENV.reset(jax.random.key(0))
    for action in (0, 3, 1, 4):
        state, out = ENV.step(state, action, jax.random.key(0))
    leaves = jax.tree.map(lambda leaf: leaf[None], out.observation[STATE])
    recurrent = stepper(ENV.spec, -1.0, lambda *_: (jnp.zeros((1, 9)), jnp.full(1, 0.7)))
    node = Node(leaves, jnp.zeros(1, bool))
    won, over = recurrent((), jax.random.key(0), jnp.array([2]), node)
    assert (won.reward, won.discount, won.value, over.over) == (1, 0, 0, True)
    on, _ = recurrent((), jax.random.key(0), jnp.array([6]), node)
    assert (on.reward, on.discount) == (0, -1) and on.value == pytest.approx(0.7)
    after, still = recurrent((), jax.random.key(0), jnp.array([5]), over)
    assert (after.reward, after.discount, after.value, still.over) == (0, 0, 0, True)


def test_chance_in_the_search_is_the_searchs_own():
    """2048 puts its tiles by the key of the search: other keys, other tiles."""
    env = envs.with_state(envs.make("pgx/2048"))
    _, seen = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 1))
    recurrent = stepper(env.spec, 1.0, lambda params, key, seen: (jnp.zeros((1, 4)), jnp.zeros(1)))
    node = Node(seen[STATE], jnp.zeros(1, bool))
    action = jnp.argmax(seen["action_mask"], -1).astype(jnp.int32)
    step = fast_jit(lambda key: recurrent((), key, action, node)[1].state)
    boards = {b"".join(np.asarray(leaf).tobytes() for leaf in step(jax.random.key(seed))) for seed in range(6)}
    assert len(boards) > 1


def test_illegal_actions_are_masked_at_every_depth():
    """No node of a tree is reached by a move onto a stone."""
    seen, _ = positions()
    size = len(seen["action_mask"])
    agent = muzero.alphazero(ENV.spec, muzero.AlphaZeroConfig(num_simulations=12), muzero.network(8, 1, 8))
    params = fast_jit(agent.initial_learner_state)(jax.random.key(0)).params
    model = environment_model(ENV.spec)
    planner = _planner(agent)

    def trees(key):
        root = model.root(planner, params, seen)
        return search.gumbel_muzero_policy(
            params, key, root, model.recurrent(planner), 12, invalid_actions=~np.asarray(seen["action_mask"])
        ).search_tree

    tree = fast_jit(trees)(jax.random.key(0))
    legal = jax.vmap(ENV.state_of)({STATE: tree.embeddings.state}).game.legal_action_mask
    child, over = np.asarray(tree.child), np.asarray(tree.embeddings.over)
    assert ((child >= 0) & ~over[:, None]).sum() > 5 * size
    assert not np.any((child >= 0) & ~np.asarray(legal) & ~over[:, None])


def _planner(agent):
    from muzero.model import Heads
    from muzero.support import Support
    from podracer.networks.functional import functional
    from podracer.networks.policies import policy

    network = functional(lambda rngs: agent.network(ENV.spec, Heads(21, 0), rngs))
    return planning.Planner(network, Support(1.0, 21), Support(1.0, 0), -1.0, policy(ENV.spec.action))


def test_the_memory_holds_no_states():
    it = contract_bench(Case("alphazero", "muzero", "modelled", False))
    state, _ = it.trained(1)
    assert set(state.memory.sequences.observation) == {"observation", "action_mask"}
    assert "reward_loss" not in state.slow.metrics and state.slow.metrics["value_loss"] > 0


def test_nothing_unrolled_is_the_start_of_an_unroll():
    """Targets of K = 0 are those of the first position of K = 2."""
    it = contract_bench(Case("alphazero", "muzero", "modelled", False))
    trajectory, _ = it.unroll(it.init(jax.random.key(0)).params, 0)
    notes = trajectory.actor_output.extras
    flags = trajectory.timestep._replace(observation=())
    start = jnp.arange(16) % 3
    window = targets.Window(flags, trajectory.actor_output.action, notes.policy, notes.value, start)
    random_action = jnp.zeros((2, 16), jnp.int32)
    none, two = (targets.targets(window, k, -1.0, 9, 1.0, random_action[:k]) for k in (0, 2))
    assert none.reward.shape == (0, 16) and none.action.shape == (0, 16)
    for name in ("value", "policy", "value_mask", "policy_mask"):
        np.testing.assert_array_equal(getattr(none, name), getattr(two, name)[:1])


def test_the_rules_of_search_are_both_there():
    """PUCT, and Gumbel's in rounds: policies sum to 1, moves are legal."""
    for settings in ({"rule": "puct"}, {"search": "rounds"}):
        agent = muzero.alphazero(
            SPECS["modelled"], muzero.AlphaZeroConfig(num_simulations=4, **settings), muzero.network(8, 1, 8)
        )
        it = Bench(agent, SPECS["modelled"])
        params = it.init(jax.random.key(0)).params
        trajectory, _ = it.unroll(params, 0)
        np.testing.assert_allclose(trajectory.actor_output.extras.policy.sum(-1), 1, rtol=1e-5)
        now = jax.tree.map(lambda leaf: leaf[0], trajectory.timestep)
        assert np.take_along_axis(
            np.asarray(now.observation["action_mask"]), np.asarray(trajectory.actor_output.action[0])[:, None], -1
        ).all()


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"the spec of discrete has no model.*envs.with_state\(env\)"):
        muzero.alphazero(SPECS["discrete"])
    with pytest.raises(UserError, match=r"search is rounds and rule puct; expected fast or mctx"):
        muzero.AlphaZeroConfig(rule="puct", search="rounds")
    with pytest.raises(UserError, match=r"unknown rule 'uct'.*Did you mean 'puct'"):
        muzero.AlphaZeroConfig(rule="uct")
    with pytest.raises(UserError, match=r"value_scale is 0"):
        muzero.AlphaZeroConfig(value_scale=0)
