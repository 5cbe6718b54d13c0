"""Networks: sequences against single steps, observations of all kinds, what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podracer import networks, specs
from podracer.errors import UserError
from podracer.networks.functional import functional
from podracer.networks.heads import ActorCritic, QNetwork
from podracer.networks.policies import ILLEGAL

T, B = 5, 4
TRUNK = networks.mlp((8,))
RECIPES = {"mlp": TRUNK, "lstm": networks.lstm(6, TRUNK), "gru": networks.gru(6, TRUNK)}
FLAT = specs.Array((3,))
DICT = {
    "picture": specs.Array((2, 2, 1), np.uint8),
    "speed": specs.Array((3,)),
    "alive": specs.Array((), np.bool_),
    "action_mask": specs.Array((4,), np.bool_),
}
MASKED = {"observation": specs.Array((3,)), "action_mask": specs.Array((4,), np.bool_)}


def make_spec(observation=FLAT, action=specs.Discrete(4)):
    return specs.Spec("test", observation, action)


def draw(observation_spec, shape, seed=0):
    """A random observation; masks have a legal action."""
    rng = np.random.default_rng(seed)

    def leaf(path, spec):
        full = (*shape, *spec.shape)
        if spec.dtype == np.uint8:
            return jnp.asarray(rng.integers(0, 3, full), jnp.uint8)
        if spec.dtype == np.bool_:
            values = rng.random(full) < 0.5
            if "action_mask" in jax.tree_util.keystr(path):
                values[..., 1] = True
            return jnp.asarray(values)
        return jnp.asarray(rng.normal(size=full), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, observation_spec)


def actor_critic(spec, recipe, shared=False):
    return functional(lambda rngs: ActorCritic(spec, recipe, shared, rngs))


def q_network(spec, recipe):
    return functional(lambda rngs: QNetwork(spec, recipe, rngs))


HEADS = {
    "separate": actor_critic,
    "shared": functools.partial(actor_critic, shared=True),
    "q": q_network,
}


@pytest.mark.parametrize("observation_spec", [FLAT, DICT], ids=["flat", "dict"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sequence_is_its_steps_one_at_a_time(recipe, head, observation_spec):
    """`unroll` gives what `act` gives step by step, with episodes that start inside, and the same state after it."""
    network = HEADS[head](make_spec(observation_spec), RECIPES[recipe])
    weights = network.init(jax.random.key(0))
    observation = draw(observation_spec, (T, B))
    first = jnp.asarray(np.random.default_rng(1).random((T, B)) < 0.4)
    state = jax.tree.map(lambda leaf: leaf + 0.3, network.module.initial_state(B))
    unroll = jax.jit(lambda w, *args: network.apply(w, lambda module, *args: module.unroll(*args), *args))
    act = jax.jit(lambda w, *args: network.apply(w, lambda module, *args: module.act(*args), *args))
    outputs, after = unroll(weights, observation, first, state)
    steps = []
    for t in range(T):
        now = jax.tree.map(lambda leaf, t=t: leaf[t], observation)
        output, state = act(weights, now, first[t], state)
        steps.append(output)
    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5),
        (outputs, after),
        (jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps), state),
    )


@pytest.mark.parametrize("recipe", ["lstm", "gru"])
def test_an_episode_start_forgets_everything_before_it_and_nothing_else_does(recipe):
    """Outputs from `first` on do not depend on earlier observations or on the state; before it they do."""
    network = q_network(make_spec(), RECIPES[recipe])
    weights = network.init(jax.random.key(0))
    one, other = draw(FLAT, (T, B), 1), draw(FLAT, (T, B), 2)
    other = other.at[2:].set(one[2:])
    reset = jnp.zeros((T, B), bool).at[2, 0].set(True)
    run = jax.jit(lambda *args: network.apply(weights, lambda module, *args: module.unroll(*args)[0], *args))
    zeros = network.module.initial_state(B)
    a = run(one, reset, zeros)
    b = run(other, reset, jax.tree.map(lambda leaf: leaf + 1.0, zeros))
    np.testing.assert_array_equal(a[2:, 0], b[2:, 0])
    assert np.all(np.abs(a[2:, 1:] - b[2:, 1:]).max(-1) > 1e-7)
    assert np.all(np.abs(a[:2] - b[:2]).max(-1) > 1e-7)
    # The state after a reset is the initial one: the same observations at the start of a sequence say the same.
    np.testing.assert_allclose(a[2:, 0], run(one[2:], jnp.zeros((T - 2, B), bool), zeros)[:, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_networks_look_at_every_leaf_but_the_mask(recipe):
    """Each leaf of a dict observation changes the value; the action mask changes only which actions are possible."""
    network = actor_critic(make_spec(DICT), RECIPES[recipe])
    weights = network.init(jax.random.key(0))
    observation, first, state = draw(DICT, (B,)), jnp.zeros(B, bool), network.module.initial_state(B)
    run = jax.jit(lambda seen: network.apply(weights, lambda module, *args: module.act(*args)[0], seen, first, state))
    base = run(observation)
    for name, leaf in observation.items():
        changed = ~leaf if leaf.dtype == bool else leaf + 1
        if name == "action_mask":
            changed = changed.at[:, 0].set(True)
        seen = run({**observation, name: changed})
        if name == "action_mask":
            np.testing.assert_array_equal(seen.value, base.value)
            np.testing.assert_array_equal(seen.policy == ILLEGAL, ~np.asarray(changed))
        else:
            assert np.all(seen.value != base.value), name
            np.testing.assert_array_equal(seen.policy == ILLEGAL, ~np.asarray(observation["action_mask"]))


def test_a_mask_beside_a_single_observation_leaves_that_observation():
    """`{"observation": x, "action_mask": m}` is x to the network: the weights are those for x alone."""
    masked, plain = actor_critic(make_spec(MASKED), TRUNK), actor_critic(make_spec(), TRUNK)
    weights = plain.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, weights, masked.init(jax.random.key(0)))
    observation = draw(MASKED, (B,))
    first = jnp.zeros(B, bool)

    def value(network, seen):
        state = network.module.initial_state(B)
        return network.apply(weights, lambda module, *args: module.act(*args)[0].value, seen, first, state)

    np.testing.assert_array_equal(value(masked, observation), value(plain, observation["observation"]))


def test_q_values_of_illegal_actions_are_those_of_a_lost_cause():
    network = q_network(make_spec(MASKED), TRUNK)
    observation = draw(MASKED, (B,))
    weights = network.init(jax.random.key(0))
    q = network.apply(weights, lambda module, *args: module.act(*args)[0], observation, jnp.zeros(B, bool), ())
    np.testing.assert_array_equal(q == ILLEGAL, ~np.asarray(observation["action_mask"]))


def gradients(shared, what):
    network = actor_critic(make_spec(), TRUNK, shared)
    weights = network.init(jax.random.key(0))
    observation, first, state = draw(FLAT, (B,)), jnp.zeros(B, bool), network.module.initial_state(B)

    def loss(weights):
        seen = network.apply(weights, lambda module, *args: module.act(*args)[0], observation, first, state)
        return jnp.sum(getattr(seen, what) ** 2)

    flat, _ = jax.tree.flatten_with_path(jax.grad(loss)(weights))
    return {jax.tree_util.keystr(path): bool(np.any(leaf != 0)) for path, leaf in flat}


def test_separate_trunks_share_nothing_and_a_shared_one_learns_from_both():
    """Which weights the policy and the value depend on."""
    apart = {what: {name for name, moved in gradients(False, what).items() if moved} for what in ("policy", "value")}
    assert apart["policy"] and apart["value"] and not apart["policy"] & apart["value"]
    together = {what: {name for name, moved in gradients(True, what).items() if moved} for what in ("policy", "value")}
    common = together["policy"] & together["value"]
    assert common and all("trunks" in name for name in common)
    assert len(gradients(True, "value")) < len(gradients(False, "value"))


def test_the_first_policy_is_nearly_uniform_and_different_keys_give_different_weights():
    network = actor_critic(make_spec(), TRUNK)
    one, other = (network.init(jax.random.key(seed)) for seed in (0, 1))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    jax.tree.map(np.testing.assert_array_equal, one, network.init(jax.random.key(0)))
    observation, state = draw(FLAT, (B,)), network.module.initial_state(B)
    seen = network.apply(one, lambda module, *args: module.act(*args)[0], observation, jnp.zeros(B, bool), state)
    np.testing.assert_allclose(jax.nn.softmax(seen.policy), 0.25, atol=0.02)
    # The trunks of policy and value start apart.
    flat = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.flatten_with_path(one)[0]}
    kernels = [leaf for name, leaf in flat.items() if "trunks" in name and "kernel" in name]
    assert len(kernels) == 2 and np.any(kernels[0] != kernels[1])


class Dropped(nnx.Module):
    def __init__(self, observation_spec, rngs):
        self.layer = nnx.Linear(3, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, observation):
        return self.dropout(self.layer(observation))


class Normed(nnx.Module):
    def __init__(self, observation_spec, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, observation):
        return self.norm(observation)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("module", "kind"), [(Dropped, "Rng"), (Normed, "BatchStat"), (networks.gru(4, Normed), "BatchStat")]
)
def test_a_network_with_state_besides_its_parameters_is_refused(module, kind, head):
    """Dropout and batch norm: the message names what they keep, and what to use instead."""
    with pytest.raises(UserError, match=f"{kind}.*LayerNorm instead of BatchNorm"):
        HEADS[head](make_spec(), module)


class Own(nnx.Module):
    """A user's trunk: any module that maps [N, ...] to [N, features]."""

    def __init__(self, observation_spec, rngs):
        self.layer = nnx.Linear(observation_spec.shape[0], 5, rngs=rngs)

    def __call__(self, observation):
        return jax.nn.relu(self.layer(observation))


@pytest.mark.parametrize("recipe", [Own, networks.lstm(6, Own)], ids=["alone", "under an lstm"])
def test_a_module_of_the_users_own_is_a_trunk(recipe):
    network = actor_critic(make_spec(), recipe)
    state = network.module.initial_state(B)
    seen = network.apply(
        network.init(jax.random.key(0)),
        lambda module, *args: module.act(*args)[0],
        draw(FLAT, (B,)),
        jnp.zeros(B, bool),
        state,
    )
    assert (seen.policy.shape, seen.value.shape) == ((B, 4), (B,))


@pytest.mark.parametrize("layer_norm", [False, True])
def test_an_mlp_is_dense_layers_in_a_row(layer_norm):
    """Against the same computation in numpy."""
    recipe = networks.mlp((6, 5), "relu", layer_norm)
    network = functional(lambda rngs: recipe(FLAT, rngs))
    weights = network.init(jax.random.key(0))
    observation = draw(FLAT, (B,))
    got = network.apply(weights, lambda module, x: module(x), observation)
    x = np.asarray(observation, np.float64)
    for i in range(2):
        kernel, bias = (np.asarray(weights["layers"][i][name], np.float64) for name in ("kernel", "bias"))
        np.testing.assert_array_equal(bias, 0)
        x = x @ kernel
        if layer_norm:
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        x = np.maximum(x, 0)
    np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-5)
    # Orthogonal weights times sqrt(2).
    kernel = np.asarray(weights["layers"][0]["kernel"])
    np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(3), atol=1e-5)


PICTURE = specs.Array((4, 40, 40), np.uint8)
CONVOLUTIONAL = {
    "cnn": networks.cnn((4, 8), ((8, 4), (4, 2)), 16),
    "cnn, layer norm": networks.cnn((4, 8), ((8, 4), (4, 2)), 16, True),
    "resnet": networks.resnet((4, 4), 16),
    "resnet, layer norm": networks.resnet((4, 4), 16, True),
}


@pytest.mark.parametrize("cell", [None, "lstm", "gru"])
@pytest.mark.parametrize("trunk", CONVOLUTIONAL)
def test_convolutional_trunks_with_any_cell_unroll_as_they_act(trunk, cell):
    """Pictures as bytes, with an episode that starts inside."""
    recipe = CONVOLUTIONAL[trunk] if cell is None else networks.recurrent(cell, 6, CONVOLUTIONAL[trunk])
    network = actor_critic(make_spec(PICTURE), recipe)
    weights, rng = network.init(jax.random.key(0)), np.random.default_rng(0)
    pictures = jnp.asarray(rng.integers(0, 256, (3, 2, *PICTURE.shape)), jnp.uint8)
    first = jnp.asarray([[True, True], [False, True], [False, False]])
    state = network.module.initial_state(2)
    unroll = jax.jit(lambda w, *args: network.apply(w, lambda module, *args: module.unroll(*args)[0], *args))
    act = jax.jit(lambda w, *args: network.apply(w, lambda module, *args: module.act(*args), *args))
    whole = unroll(weights, pictures, first, state)
    for t in range(3):
        output, state = act(weights, pictures[t], first[t], state)
        np.testing.assert_allclose(output.value, whole.value[t], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(output.policy, whole.policy[t], rtol=1e-4, atol=1e-5)
    assert len(np.unique(np.asarray(whole.value))) == 6


def features_of(recipe, observation_spec, observation, weights=None):
    network = functional(lambda rngs: recipe(observation_spec, rngs))
    weights = network.init(jax.random.key(0)) if weights is None else weights
    return network.apply(weights, lambda module, x: module(x), observation), weights


def test_bytes_are_scaled_to_one_and_planes_may_come_first_or_last():
    """In convolutions and in an mlp."""
    recipe, rng = CONVOLUTIONAL["cnn"], np.random.default_rng(0)
    pictures = jnp.asarray(rng.integers(0, 256, (2, *PICTURE.shape)), jnp.uint8)
    seen, weights = features_of(recipe, PICTURE, pictures)
    scaled, _ = features_of(recipe, specs.Array(PICTURE.shape), pictures / 255.0, weights)
    np.testing.assert_allclose(seen, scaled, rtol=1e-5, atol=1e-6)
    last, _ = features_of(recipe, specs.Array((40, 40, 4), np.uint8), jnp.moveaxis(pictures, 1, -1), weights)
    np.testing.assert_array_equal(seen, last)
    small = specs.Array((2, 2, 3), np.uint8)
    bytes_ = pictures[:, :2, :2, :3]
    seen, weights = features_of(TRUNK, small, bytes_)
    scaled, _ = features_of(TRUNK, specs.Array((2, 2, 3)), bytes_ / 255.0, weights)
    np.testing.assert_allclose(seen, scaled, rtol=1e-5, atol=1e-6)


def test_a_picture_beside_other_observations():
    """The dense layer sees both."""
    spec = {"picture": PICTURE, "speed": specs.Array((3,))}
    rng = np.random.default_rng(0)
    observation = {
        "picture": jnp.asarray(rng.integers(0, 256, (2, *PICTURE.shape)), jnp.uint8),
        "speed": jnp.ones((2, 3)),
    }
    base, weights = features_of(CONVOLUTIONAL["cnn"], spec, observation)
    for name in spec:
        changed, _ = features_of(CONVOLUTIONAL["cnn"], spec, {**observation, name: observation[name] * 0}, weights)
        assert np.all(np.any(changed != base, -1)), name


def test_networks_that_do_not_fit_the_observation_say_which_do():
    for recipe, spec, says in (
        (networks.nature(), FLAT, r"got observations of shapes \[\(3,\)\]; expected one of 3 axes.*--network mlp"),
        (networks.nature(), specs.Array((10, 10, 4)), "too small for cnn.*--network impala or mlp"),
        (networks.mlp(), PICTURE, r"an mlp got pictures of shape \(4, 40, 40\); choose --network nature or impala"),
        (networks.lstm(4), PICTURE, "an mlp got pictures"),
    ):
        with pytest.raises(UserError, match=says):
            actor_critic(make_spec(spec), recipe)


def test_published_sizes():
    """Parameters of the trunks: Mnih et al. 2015; Espeholt et al. 2018, figure 3, for 84 x 84 x 4."""
    for recipe, number in (
        (networks.nature(), 1_684_128),
        (networks.impala_shallow(), 4_112 + 8_224 + 32 * 81 * 256 + 256),
        (networks.impala_resnet(), 97_744 + 32 * 121 * 256 + 256),
    ):
        network = functional(lambda rngs, recipe=recipe: recipe(specs.Array((4, 84, 84), np.uint8), rngs))
        shapes = jax.eval_shape(network.init, jax.random.key(0))
        assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == number
