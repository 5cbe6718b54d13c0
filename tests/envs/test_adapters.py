"""What is particular to each library: its ends, its masks, its seats, its leftovers."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from podracer import envs
from podracer.envs import Batch, Brax, CartPole, Craftax, Gymnax, Jumanji, Navix, Pgx, XMiniGrid, api
from podracer.errors import UserError


def play(batch, policy, steps, size=8, seed=0):
    """Time steps [T + 1, B] (numpy) of `policy(observation, key) -> action`, and the actions [T, B]."""

    @jax.jit
    def run(keys):
        state, first = batch.init(keys[0])

        def step(carry, key):
            state, observation = carry
            action = policy(observation, key[0])
            state, timestep = batch.step(state, action, key)
            return (state, timestep.observation), (timestep, action)

        _, (rest, actions) = jax.lax.scan(step, (state, first.observation), keys[1:])
        return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest), actions

    return jax.tree.map(np.asarray, run(jax.random.split(jax.random.key(seed), (steps + 1, size))))


# gymnax


@struct.dataclass
class WalkState:
    position: int
    time: int


@struct.dataclass
class WalkParams:
    goal: int = 3
    max_steps_in_episode: int = 4


class OldWalk:
    """An environment with the signatures of gymnax 0.0.9: five values, one `done` for the goal and the time limit."""

    default_params = WalkParams()

    def reset_env(self, key, params):
        return jnp.zeros(2), WalkState(position=0, time=0)

    def step_env(self, key, state, action, params):
        state = WalkState(position=state.position + action, time=state.time + 1)
        done = (state.position >= params.goal) | (state.time >= params.max_steps_in_episode)
        return jnp.stack([state.position, state.time]) * 1.0, state, 1.0, done, {"discount": 1.0 - done}

    def action_space(self, params):
        return types.SimpleNamespace(n=2)

    def observation_space(self, params):
        return types.SimpleNamespace(low=0.0, high=4.0)


@pytest.fixture
def old_gymnax(monkeypatch):
    module = types.ModuleType("gymnax")
    module.registered_envs = ["Walk-v0"]
    module.make = lambda name, **options: (OldWalk(), OldWalk.default_params)
    monkeypatch.setitem(sys.modules, "gymnax", module)


@pytest.mark.parametrize(
    ("goal", "actions", "ends"),
    [
        (3, [1, 1, 1], [None, None, "terminated"]),
        (3, [0, 0, 1, 1], [None, None, None, "truncated"]),
        (3, [0, 1, 1, 1], [None, None, None, "terminated"]),  # at the limit, and all the same the goal
    ],
)
def test_old_gymnax_ends_are_told_apart(old_gymnax, goal, actions, ends):
    env = Gymnax("Walk-v0", goal=goal)
    assert env.spec.truncates and env.spec.max_episode_steps == 4
    state, _ = env.reset(jax.random.key(0))
    for action, end in zip(actions, ends, strict=True):
        state, out = env.step(state, jnp.int32(action), jax.random.key(0))
        assert (bool(out.terminated), bool(out.truncated)) == (end == "terminated", end == "truncated")


def test_old_gymnax_runs_in_a_batch(old_gymnax):
    got, _ = play(Batch(Gymnax("Walk-v0")), lambda seen, key: jnp.zeros(8, jnp.int32), 10)
    assert (got.discount == 1).all() and (got.observation[4::5, :, 1] == 4).all() and got.first[5::5].all()


def test_gymnax_that_only_truncates_keeps_discount_1_and_the_final_observation():
    env = Gymnax("Pendulum-v1", max_steps_in_episode=5)
    got, actions = play(Batch(env), lambda seen, key: jax.random.uniform(key, (8, 1), minval=-1.0), 11)
    assert (got.discount == 1).all()
    assert got.first[6].all() and not got.first[1:6].any()
    # The fifth observation follows from the fourth by the pendulum's own equations.
    cosine, sine, spin = got.observation[4].T
    torque = 2 * actions[4][:, 0]
    spin = np.clip(spin + (15 * sine + 3 * torque) * 0.05, -8, 8)
    angle = np.arctan2(sine, cosine) + spin * 0.05
    np.testing.assert_allclose(got.observation[5].T, [np.cos(angle), np.sin(angle), spin], rtol=1e-4, atol=1e-4)


def test_own_cartpole_has_the_physics_of_gymnax():
    gymnax = pytest.importorskip("gymnax")
    own, (theirs, params) = CartPole(), gymnax.make("CartPole-v1")

    def step(carry, action):
        mine, other = carry
        mine, out = own.step(mine, action, jax.random.key(0))
        seen, other, _, terminated, _ = theirs.step_env(jax.random.key(0), other, action, params)
        return (mine, other), (out.observation, seen, out.terminated, terminated)

    @jax.jit
    def run(key):
        observation, other = theirs.reset_env(key, params)
        mine, _ = own.reset(key)
        mine = mine._replace(physics=observation)
        return jax.lax.scan(step, (mine, other), jax.random.randint(key, (60,), 0, 2))[1]

    mine, other, terminated, expected = jax.tree.map(np.asarray, run(jax.random.key(3)))
    np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(terminated, expected)
    assert terminated.any()


def test_own_cartpole_has_the_physics_and_limits_of_gymnasium():
    gymnasium = pytest.importorskip("gymnasium")
    theirs, own = gymnasium.make("CartPole-v1"), CartPole()
    observation, _ = theirs.reset(seed=0)
    state, _ = own.reset(jax.random.key(0))
    state, step = state._replace(physics=jnp.asarray(observation)), jax.jit(own.step)
    for k in range(200):
        action = k % 2 if k < 20 else 1
        seen, reward, terminated, _, _ = theirs.step(action)
        state, out = step(state, jnp.int32(action), jax.random.key(0))
        np.testing.assert_allclose(out.observation, seen, rtol=1e-4, atol=1e-4)
        assert (float(out.reward), bool(out.terminated)) == (reward, terminated)
        if terminated:
            break
    assert terminated


# brax


class Leaky:
    """A brax environment that counts its steps in `info` and ends after three."""

    action_size = 2

    def __init__(self, backend="spring"):
        self.backend = backend

    def reset(self, rng):
        from brax.envs import State

        zero = jnp.zeros(())
        return State(None, jax.random.uniform(rng, (2,)), zero, zero, {}, {"count": jnp.zeros((), jnp.int32)})

    def step(self, state, action):
        count = state.info["count"] + 1
        done = (count >= 3).astype(jnp.float32)
        return state.replace(obs=state.obs + action, reward=count * 1.0, done=done, info={"count": count})


@pytest.fixture
def leaky():
    brax_envs = pytest.importorskip("brax.envs")
    brax_envs.register_environment("leaky", Leaky)
    yield "leaky"
    del brax_envs._envs["leaky"]


@pytest.mark.parametrize("starts", ["fresh", "cached"])
def test_brax_info_ends_with_its_episode(leaky, starts):
    got, _ = play(Batch(Brax(leaky), starts=starts), lambda seen, key: jnp.zeros((8, 2)), 11)
    assert got.reward[1:, 0].tolist() == [1, 2, 3, 0] * 2 + [1, 2, 3]
    assert got.discount[1:, 0].tolist() == [1, 1, 0, 1] * 2 + [1, 1, 0]
    later = {tuple(seen) for seen in got.observation[4].tolist()}
    first = {tuple(seen) for seen in got.observation[0].tolist()}
    assert later <= first if starts == "cached" else not later & first


def test_brax_is_cut_by_our_limit(leaky):
    env = Brax(leaky, episode_length=2)
    assert env.spec.max_episode_steps == 2 and env.spec.action == api.Continuous((-1.0,) * 2, (1.0,) * 2)
    got, _ = play(Batch(env), lambda seen, key: jnp.full((8, 2), 5.0), 5)
    assert (got.discount == 1).all() and got.first[3].all()
    np.testing.assert_allclose(got.observation[2], got.observation[0] + 2, rtol=1e-6)  # clipped to 1


@pytest.mark.filterwarnings("ignore:Brax System:UserWarning")  # brax says that it is not maintained
def test_brax_tasks_may_give_python_numbers():
    pytest.importorskip("brax.envs")
    env = Brax("inverted_pendulum", backend="spring")
    state, observation = jax.eval_shape(env.reset, jax.random.key(0))
    after, out = jax.eval_shape(env.step, state, jax.ShapeDtypeStruct((1,), jnp.float32), jax.random.key(0))
    assert out.reward.dtype == jnp.float32 and out.terminated.dtype == out.truncated.dtype == jnp.bool_
    assert jax.tree.structure(after) == jax.tree.structure(state) and out.observation.shape == observation.shape == (4,)


# jumanji


class Ends:
    """A jumanji environment whose action says how the episode ends: 0 not, 1 terminated, 2 truncated."""

    def __init__(self):
        from jumanji import specs

        self.action_spec = specs.DiscreteArray(3)

    def reset(self, key):
        from jumanji import types as jumanji_types

        return jnp.zeros(()), jumanji_types.restart(jnp.zeros(2))

    def step(self, state, action):
        from jumanji import types as jumanji_types

        timestep = jumanji_types.transition(jnp.float32(1.0), jnp.ones(2))
        return state, timestep.replace(
            step_type=jnp.where(action == 0, 1, 2).astype(jnp.int8), discount=jnp.where(action == 1, 0.0, 1.0)
        )


def test_jumanji_ends_are_told_apart_by_their_discount(monkeypatch):
    registration = pytest.importorskip("jumanji.registration")
    monkeypatch.setattr(registration, "registered_environments", lambda: {"Ends-v0"})
    monkeypatch.setattr(registration, "make", lambda id: Ends())
    env = Jumanji("Ends-v0")
    assert env.spec.observation == {"observation": api.Array((2,), np.dtype(np.float32))}
    state, _ = env.reset(jax.random.key(0))
    ends = []
    for action in range(3):
        _, out = env.step(state, jnp.int32(action), jax.random.key(0))
        ends.append((bool(out.terminated), bool(out.truncated)))
    assert ends == [(False, False), (True, False), (False, True)]


def test_jumanji_joint_masks_become_one_discrete_action():
    pytest.importorskip("jumanji")
    env = Jumanji("Minesweeper-v0")
    assert env.spec.action == api.Discrete(100) and env.spec.observation["action_mask"].shape == (100,)
    state, observation = jax.jit(env.reset)(jax.random.key(0))
    _, out = jax.jit(env.step)(state, jnp.int32(37), jax.random.key(0))
    opened = np.argwhere(np.asarray(out.observation["board"]) != np.asarray(observation["board"]))
    assert opened.tolist() == [[3, 7]]
    assert np.flatnonzero(~np.asarray(out.observation["action_mask"])).tolist() == [37]


def test_jumanji_masks_per_choice_are_joined():
    pytest.importorskip("jumanji")
    env = Jumanji("Cleaner-v0")
    assert env.spec.action == api.MultiDiscrete((4, 4, 4)) and env.spec.observation["action_mask"].shape == (12,)


def test_jumanji_randomness_comes_from_the_step():
    pytest.importorskip("jumanji")
    env = Jumanji("Game2048-v1")
    state, observation = jax.jit(env.reset)(jax.random.key(0))
    action = jnp.argmax(observation["action_mask"]).astype(jnp.int32)
    after = jax.jit(jax.vmap(env.step, (None, None, 0)))(state, action, jax.random.split(jax.random.key(1), 8))[1]
    boards = np.asarray(after.observation["board"]).reshape(8, -1)
    assert len(np.unique(boards, axis=0)) > 1


@pytest.mark.parametrize(
    ("id", "message"), [("Connector-v3", "10 rewards, one per agent"), ("MultiCVRP-v0", "expected discrete ones")]
)
def test_unsupported_jumanji_tasks_say_why(id, message):
    pytest.importorskip("jumanji")
    with pytest.raises(UserError, match=message):
        Jumanji(id)


# pgx

LINES = [*np.arange(9).reshape(3, 3), *np.arange(9).reshape(3, 3).T, np.array([0, 4, 8]), np.array([2, 4, 6])]


def has_line(stones):
    return any(stones[line].all() for line in LINES)


def first_legal(observation, legal_action_mask, key):
    return jnp.argmax(legal_action_mask).astype(jnp.int32)


def careless(observation, key):
    """Any action, an illegal one less often: it costs the game."""
    return jax.random.categorical(key, jnp.where(observation["action_mask"], 0.0, -3.0)).astype(jnp.int32)


def test_pgx_rewards_and_boards_are_the_agents():
    """Tic-tac-toe against an opponent that plays the first free cell, followed move by move in numpy."""
    pytest.importorskip("pgx")
    got, actions = play(Batch(Pgx("tic_tac_toe", first_legal)), careless, 20, size=16)
    boards = got.observation["observation"].reshape(21, 16, 9, 2)
    began, rewards = set(), []
    for b in range(16):
        for t in range(1, 21):
            mine, theirs = boards[t - 1, b].T.copy()
            if got.first[t - 1, b]:
                assert not mine.any() and theirs.sum() == theirs[0]
                began.add(bool(theirs.any()))
            illegal = (mine | theirs)[actions[t - 1, b]]
            mine[actions[t - 1, b]] = True
            reward, over = float(has_line(mine)), has_line(mine) or (mine | theirs).all()
            if illegal:
                reward, over = -1.0, True
            if not over:
                theirs[np.flatnonzero(~(mine | theirs))[0]] = True
                reward, over = -float(has_line(theirs)), has_line(theirs) or (mine | theirs).all()
            assert (got.reward[t, b], got.discount[t, b]) == (reward, 1.0 - over)
            rewards.append(reward)
            if not over:
                np.testing.assert_array_equal(boards[t, b].T, [mine, theirs])
                np.testing.assert_array_equal(got.observation["action_mask"][t, b], ~(mine | theirs))
    assert began == {False, True} and set(rewards) == {-1.0, 0.0, 1.0}


def test_pgx_self_play_rewards_the_player_who_moved():
    pytest.importorskip("pgx")
    got, actions = play(Batch(Pgx("tic_tac_toe", "self")), careless, 20, size=8)
    boards = got.observation["observation"].reshape(21, 8, 9, 2)
    for b in range(8):
        for t in range(1, 21):
            mover, other = boards[t - 1, b].T.copy()
            illegal = (mover | other)[actions[t - 1, b]]
            mover[actions[t - 1, b]] = True
            won, full = has_line(mover), (mover | other).all()
            over = won or full or illegal
            assert got.reward[t, b] == (-1.0 if illegal else float(won)) and got.discount[t, b] == float(not over)
            if not over:
                np.testing.assert_array_equal(boards[t, b].T, [other, mover])  # the view changes sides
    assert {-1.0, 0.0, 1.0} == set(got.reward.ravel().tolist())


def test_pgx_self_play_from_random_openings():
    """After 0 to 9 moves, never from a finished game, whoever is to move; every count comes up."""
    pytest.importorskip("pgx")
    env = Pgx("tic_tac_toe", "self", opening_moves=9)
    _, seen = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 512))
    boards = np.asarray(seen["observation"]).reshape(512, 9, 2)
    mine, theirs = boards[..., 0].astype(bool), boards[..., 1].astype(bool)
    counts = mine.sum(1) + theirs.sum(1)
    assert set(counts.tolist()) == set(range(9)) and np.mean(counts == 0) == pytest.approx(0.1, abs=0.05)
    np.testing.assert_array_equal(theirs.sum(1) - mine.sum(1), counts % 2)
    assert not any(has_line(line) for line in (*mine, *theirs))
    np.testing.assert_array_equal(seen["action_mask"], ~(mine | theirs))
    assert env.evaluation == Pgx("tic_tac_toe", "random")


def test_pgx_arguments_are_checked():
    with pytest.raises(UserError, match="opponent is 'rndom'; expected 'random', 'self' or a function"):
        Pgx("tic_tac_toe", "rndom")
    for arguments in (("2048",), ("backgammon", "self"), ("tic_tac_toe", "random")):
        with pytest.raises(UserError, match=r"opening_moves is 2, but .*; expected 0"):
            Pgx(*arguments, opening_moves=2)
    with pytest.raises(UserError, match="opening_moves is -1"):
        Pgx("tic_tac_toe", "self", opening_moves=-1)


# navix and xminigrid

# The way to the goal of an empty 5 x 5 room: two steps, a turn to the right, two steps.
WAYS = {"navix/Navix-Empty-5x5-v0": [2, 2, 1, 2, 2], "xminigrid/MiniGrid-Empty-5x5": [0, 0, 1, 0, 0]}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("limit", [4, 5, 6])
def test_grid_worlds_are_cut_at_their_limit_and_end_at_the_goal(name, limit):
    """At the goal in the last step, too, the episode terminated."""
    pytest.importorskip(name.partition("/")[0])
    env = envs.make(name, max_steps=limit)
    assert env.spec.truncates and env.spec.max_episode_steps == limit
    state, _ = env.reset(jax.random.key(0))
    step, ends = jax.jit(env.step), []
    for action in WAYS[name][:limit]:
        state, out = step(state, jnp.int32(action), jax.random.key(0))
        ends.append((bool(out.terminated), bool(out.truncated)))
    assert ends[:-1] == [(False, False)] * (len(ends) - 1)
    assert ends[-1] == ((False, True) if limit == 4 else (True, False))
    assert (float(out.reward) > 0) == (limit > 4)


def test_navix_shows_symbols_as_planes_and_pictures_as_they_are():
    navix = pytest.importorskip("navix")
    env = Navix("Navix-DoorKey-5x5-v0")
    state, observation = env.reset(jax.random.key(0))
    symbols = np.asarray(navix.observations.symbolic(state.state))
    tags, colours, states = np.split(np.asarray(observation), [11, 17], -1)
    np.testing.assert_array_equal(tags.argmax(-1), symbols[..., 0])
    np.testing.assert_array_equal(tags.sum(-1), 1)
    np.testing.assert_array_equal(states.argmax(-1), symbols[..., 2])
    painted = symbols[..., 1] < 6
    np.testing.assert_array_equal(colours.argmax(-1)[painted], symbols[..., 1][painted])
    tagged = Navix("Navix-DoorKey-5x5-v0", observation="categorical").reset(jax.random.key(0))[1]
    assert tagged.shape == (5, 5, 12) and tagged.dtype == bool and (tagged.sum(-1) == 1).all()
    picture = Navix("Navix-DoorKey-5x5-v0", observation="rgb").reset(jax.random.key(0))[1]
    assert picture.dtype == np.uint8 and picture.shape[2] == 3


def test_navix_obstacles_move_by_the_key_of_the_step():
    pytest.importorskip("navix")
    env = Navix("Navix-Dynamic-Obstacles-8x8-v0")
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    step = jax.jit(jax.vmap(env.step, (None, None, 0)))
    after = step(state, jnp.int32(0), jax.random.split(jax.random.key(1), 8))[1]
    assert len(np.unique(np.asarray(after.observation).reshape(8, -1), axis=0)) > 1


def write_benchmark(path, goals):
    """Tasks of xminigrid without rules: one object each, of the tiles `goals`, to get near to."""
    from xminigrid import benchmarks
    from xminigrid.core.constants import Colors
    from xminigrid.core.goals import AgentNearGoal
    from xminigrid.core.rules import EmptyRule

    tiles = np.array([(tile, Colors.RED) for tile in goals], np.uint8)
    content = {
        "goals": np.stack([AgentNearGoal(tile=jnp.asarray(tile)).encode() for tile in tiles]),
        "rules": np.stack([EmptyRule().encode()[None]] * len(goals)),
        "init_tiles": tiles[:, None],
        "num_rules": np.zeros(len(goals), np.uint8),
    }
    benchmarks.save_bz2_pickle(content, str(path))


def test_xminigrid_worlds_have_the_tasks_of_a_benchmark(tmp_path):
    """One object each: a world shows that of its task. Walking beside it ends the episode."""
    pytest.importorskip("xminigrid")
    from xminigrid.core.constants import Tiles

    path, goals = tmp_path / "two", (Tiles.BALL, Tiles.STAR)
    write_benchmark(path, goals)
    keys = jax.random.split(jax.random.key(0), 32)

    def seen(ruleset):
        """Which of the objects are in 32 worlds."""
        env = XMiniGrid("XLand-MiniGrid-R1-9x9", benchmark=str(path), ruleset=ruleset, view_size=5)
        grids = np.asarray(jax.jit(jax.vmap(env.reset))(keys)[0].state.grid)[..., 0]
        return sorted({tuple(tile for tile in goals if (grid == tile).any()) for grid in grids})

    assert seen(0) == [(Tiles.BALL,)] and seen(1) == [(Tiles.STAR,)]
    assert seen(None) == [(Tiles.BALL,), (Tiles.STAR,)]
    env = XMiniGrid("XLand-MiniGrid-R1-9x9", benchmark=str(path))
    got, _ = play(Batch(env), lambda _, key: jax.random.randint(key, (8,), 0, 3), 200)
    assert (got.discount == 0).any() and (got.reward[got.discount == 0] > 0).all()


@pytest.mark.parametrize(
    ("id", "options", "message"),
    [
        ("XLand-MiniGrid-R1-9x9", {}, "is a world without a task; expected benchmark = trivial-21k, small-1m"),
        ("XLand-MiniGrid-R1-9x9", {"benchmark": "none/here"}, r"benchmark 'none/here' cannot be loaded \(FileNotFound"),
        ("MiniGrid-Empty-5x5", {"benchmark": "trivial-21k"}, "is a task already and takes no benchmark"),
    ],
)
def test_xminigrid_tasks_that_are_missing_or_too_many(id, options, message):
    pytest.importorskip("xminigrid")
    with pytest.raises(UserError, match=message):
        XMiniGrid(id, **options)


# craftax


@pytest.mark.parametrize("name", ["Craftax-Symbolic-v1", "Craftax-Classic-Symbolic-v1"])
@pytest.mark.parametrize(
    ("time", "health", "ends"),
    [
        (6, 9, (False, False)),
        (7, 9, (False, True)),
        (8, 9, (False, True)),
        (6, 0, (True, False)),
        (7, 0, (True, False)),
    ],
)
def test_craftax_tells_death_from_the_time_limit(name, time, health, ends):
    """In an empty world, which takes no minutes to compile."""
    pytest.importorskip("craftax")
    env = Craftax(name, max_timesteps=7)
    assert env.spec.truncates and env.spec.max_episode_steps == 7
    state, _ = jax.eval_shape(env.reset, jax.random.key(0))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    found = env._ends(state.replace(timestep=time, player_health=health))
    assert tuple(map(bool, found)) == ends


def test_craftax_pixels_are_bytes(monkeypatch):
    pytest.importorskip("craftax")
    from craftax.craftax_classic import constants, renderer

    # craftax makes its textures in all sizes at once, pixel by pixel; this one is enough here.
    monkeypatch.setattr(renderer, "load_all_textures", lambda: {7: constants.load_all_textures_given_size(7)})
    env = Craftax("Craftax-Classic-Pixels-v1")
    assert env.spec.observation == api.Array((63, 63, 3), np.dtype(np.uint8))
    assert env._observe(jnp.asarray([0.0, 0.5, 1.0])).tolist() == [0, 128, 255]


# all


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("gymnax", "gymnax/CartPole-v1"),
        ("brax", "brax/ant"),
        ("jumanji", "jumanji/TSP-v1"),
        ("pgx", "pgx/chess"),
        ("navix", "navix/Navix-Empty-5x5-v0"),
        ("xminigrid", "xminigrid/MiniGrid-Empty-5x5"),
        ("craftax", "craftax/Craftax-Symbolic-v1"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"the package '{package}'.*pip install '\.\[envs\]'"):
        envs.make(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gymnax/Cartpole-v1", {}, "unknown gymnax environment 'Cartpole-v1'. Did you mean 'CartPole-v1'"),
        ("gymnax/CartPole-v1", {"max_steps_in_epsode": 3}, "Did you mean 'max_steps_in_episode'"),
        ("brax/antt", {}, "Did you mean 'ant'"),
        ("brax/ant", {"episode_length": 0}, "episode_length is 0"),
        ("jumanji/Snake-v9", {}, "Did you mean 'Snake-v1'"),
        ("jumanji/TSP-v1", {"wings": 2}, "jumanji/TSP-v1 does not accept the options.*wings"),
        ("pgx/tictactoe", {}, "Did you mean 'tic_tac_toe'"),
        ("pgx/tic_tac_toe", {"wings": 2}, "pgx/tic_tac_toe does not accept the options.*wings"),
        ("gymnax/CartPole-v1", {"wings": {}}, "option 'wings' is of type dict"),
        ("navix/Navix-Empty-5x5", {}, "Did you mean 'Navix-Empty-5x5-v0'"),
        ("navix/Navix-Empty-5x5-v0", {"max_stps": 2}, "Did you mean 'max_steps'"),
        ("navix/Navix-Empty-5x5-v0", {"max_steps": 0}, "max_steps is 0; expected a whole number >= 1"),
        ("navix/Navix-Empty-5x5-v0", {"observation": "rbg"}, "unknown observation 'rbg'. Did you mean 'rgb'"),
        ("xminigrid/MiniGrid-Empty-5x", {}, "Did you mean 'MiniGrid-Empty-5x5'"),
        ("xminigrid/MiniGrid-Empty-5x5", {"viewsize": 5}, "Did you mean 'view_size'"),
        ("xminigrid/MiniGrid-Empty-5x5", {"max_steps": "a"}, "max_steps is 'a'; expected a whole number >= 1"),
        ("craftax/Craftax-Symbolic", {}, "Did you mean 'Craftax-Symbolic-v1'"),
        ("craftax/Craftax-Classic-Symbolic-v1", {"max_timestep": 5}, "Did you mean 'max_timesteps'"),
    ],
)
def test_wrong_names_and_options_are_user_errors(name, options, message):
    pytest.importorskip(name.partition("/")[0])
    with pytest.raises(UserError, match=message):
        envs.make(name, **options)


def test_the_listed_names_are_those_of_the_libraries():
    gymnax, jumanji, pgx = (pytest.importorskip(name) for name in ("gymnax", "jumanji", "pgx"))
    brax_envs = pytest.importorskip("brax.envs")
    listed = {family: set() for family in ("gymnax", "brax", "jumanji", "pgx", "minatar")}
    for name, _ in envs.names():
        family, slash, member = name.partition("/")
        if slash and family in listed:
            listed[family].add(member)
    assert listed["gymnax"] <= set(gymnax.registered_envs)
    assert listed["brax"] == set(brax_envs._envs)
    assert listed["jumanji"] <= jumanji.registered_environments()
    assert listed["pgx"] == set(pgx.available_envs())


def test_the_listed_grid_worlds_are_those_of_the_libraries():
    navix, xminigrid = pytest.importorskip("navix"), pytest.importorskip("xminigrid")
    listed = [name for name, _ in envs.names()]
    assert {f"navix/{name}" for name in navix.registry()} >= {name for name in listed if name.startswith("navix/")}
    assert {f"xminigrid/{name}" for name in xminigrid.registered_environments()} == {
        name for name in listed if name.startswith("xminigrid/")
    }


def test_equal_adapters_share_compiled_functions():
    pytest.importorskip("pgx")
    one, two = Pgx("tic_tac_toe", "self"), Pgx("tic_tac_toe", "self")
    assert one == two and hash(one) == hash(two) and one != Pgx("tic_tac_toe", first_legal)
    assert Gymnax("CartPole-v1") != Gymnax("CartPole-v1", max_steps_in_episode=3)
