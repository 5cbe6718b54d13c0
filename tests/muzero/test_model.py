"""The network on every kind of observation and action."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muzero.bodies import action_encoder, unit
from muzero.checks import check_model
from muzero.model import Heads, Model, network
from podracer import specs
from podracer.errors import UserError
from podracer.networks.atari import cnn
from podracer.networks.functional import functional
from podracer.specs import Array, Continuous, Discrete, MultiDiscrete, Spec
from tests.contracts.agents import SPECS, fast_jit, observations

HEADS = Heads(7, 5, projection=True)
PICTURES = {
    "vector": (Array((3,)), (6,)),
    "grid": (Array((10, 5)), (6,)),
    "atari": (Array((4, 40, 42), np.uint8), (5, 6, 6)),
    "small picture": (Array((10, 10, 4), np.bool_), (10, 10, 6)),
    "board": (Array((3, 3, 2), np.bool_), (3, 3, 6)),
    "picture and numbers": ({"picture": Array((6, 7, 2), np.uint8), "speed": Array((3,))}, (6, 7, 6)),
    "picture and numbers through a trunk": ({"picture": Array((20, 18, 2), np.uint8), "speed": Array((3,))}, (6,)),
    "masked": (SPECS["masked"].observation, (6,)),
}


def built(observation, num_actions=4, **config):
    spec = Spec("test", observation, Discrete(num_actions))
    recipe = network(**{"width": 6, "head_width": 5, **config})
    return spec, functional(lambda rngs: recipe(spec, HEADS, rngs))


def examples(leaf):
    """Two random ones."""
    numbers = np.random.default_rng(0).normal(size=(2, *leaf.shape))
    kinds = {np.uint8: np.abs(100 * numbers), np.bool_: numbers > 0}
    return jnp.asarray(kinds.get(leaf.dtype, numbers).astype(leaf.dtype))


@pytest.mark.parametrize("kind", list(PICTURES))
def test_shapes_ranges_and_gradients_on_every_observation(kind):
    """Latents in [0, 1], every parameter used, and none of an observation's leaves ignored."""
    observation, shape = PICTURES[kind]
    trunk = cnn((4, 4), ((6, 3), (3, 1)), 8)
    more = {"kind": "cnn", "trunk": trunk} if "trunk" in kind else {}
    spec, net = built(observation, 9 if kind == "board" else 4, **more)
    weights = net.init(jax.random.key(0))
    seen = jax.tree.map(examples, specs.features(observation))

    def run(module, seen):
        latent = module.represent(seen)
        after, reward = module.step(latent, jnp.array([0, 3]))
        return latent, after, reward, module.predict(after), module.project(after, True), module.project(latent, False)

    latent, after, reward, prediction, *_ = out = fast_jit(lambda w, x: net.apply(w, run, x))(weights, seen)
    assert latent.shape == after.shape == (2, *shape) and reward.shape == (2, 5)
    assert prediction.value.shape == (2, 7) and prediction.policy.shape == (2, 9 if kind == "board" else 4)
    for each in (latent, after):
        flat = np.asarray(each).reshape(2, -1)
        np.testing.assert_allclose(flat.min(1), 0, atol=1e-6)
        np.testing.assert_allclose(flat.max(1), 1, atol=1e-6)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(out))

    def total(weights, floats):
        parts = jax.tree.leaves(net.apply(weights, run, jax.tree.unflatten(structure, floats)))
        return sum(jnp.sum(jnp.sin((i + 2.0) * part)) for i, part in enumerate(parts))

    leaves, structure = jax.tree.flatten(seen)
    floats = [leaf.astype(jnp.float32) for leaf in leaves]
    of_weights, of_leaves = fast_jit(jax.grad(total, (0, 1)))(weights, floats)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves((of_weights, of_leaves)))
    assert spec.name == "test"


def test_actions_make_a_difference_and_a_stone_lies_where_it_was_put():
    spec, net = built(PICTURES["board"][0], 10)  # nine places and a pass
    weights = net.init(jax.random.key(1))
    board = jnp.zeros((10, *spec.observation.shape), bool)

    def step(module):
        latent = module.represent(board)
        return module.step(latent, jnp.arange(10))[0], module.body.dynamics.mix.kernel[...].shape

    after, kernel = net.apply(weights, step)
    assert kernel == (3, 3, 7, 6)  # one plane for the stone
    assert len({np.asarray(each).tobytes() for each in after}) == 10


def test_encoders_of_all_actions():
    encode = lambda action, value: np.asarray(action_encoder(action).encode(jnp.asarray(value))).tolist()
    assert encode(Discrete(3), [2]) == [[0, 0, 1]]
    assert encode(MultiDiscrete((2, 3)), [[1, 0]]) == [[0, 1, 1, 0, 0]]
    assert encode(Continuous((-1.0, -1.0), (1.0, 1.0)), [[0.5, -0.25]]) == [[0.5, -0.25]]
    assert [action_encoder(a).size for a in (Discrete(3), MultiDiscrete((2, 3)))] == [3, 5]


def test_a_constant_latent_stays_finite():
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(unit(x) ** 2))(jnp.full((2, 4), 3.0))
    assert value == 0 and np.all(np.isfinite(gradient))


def test_the_first_policy_is_nearly_uniform_and_the_first_values_nearly_0():
    _, net = built(PICTURES["vector"][0])
    seen = observations(PICTURES["vector"][0], (16,), 0)
    found = net.apply(net.init(jax.random.key(0)), lambda module: module.predict(module.represent(seen)))
    assert all(np.max(np.abs(logits)) < 0.1 for logits in found)


@pytest.mark.parametrize(("field", "value"), [("width", 0), ("depth", 1.5), ("head_width", -1)])
def test_sizes_that_cannot_be_are_refused_by_name(field, value):
    with pytest.raises(UserError, match=f"^{field} is"):
        network(**{field: value})


def test_a_kind_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"unknown kind 'resnt'.*resnet"):
        network(kind="resnt")
    with pytest.raises(UserError, match=r"kind is resnet.*\[\(3,\)\].*Choose kind mlp"):
        built(Array((3,)), kind="resnet")
    with pytest.raises(UserError, match=r"kind is cnn.*\[\(3,\)\].*Choose kind mlp"):
        built(Array((3,)), kind="cnn")
    assert built(PICTURES["small picture"][0], kind="mlp")[1].module.body.shape == (6,)


@pytest.mark.parametrize("wrong", ["the latent after a step", "the reward after a step", "the policy", "the value"])
def test_a_network_with_a_wrong_output_is_named(wrong):
    """What a user's own network may get wrong, before anything is compiled."""
    spec, net = built(Array((3,)))

    class Wrong(type(net.module)):
        def step(self, latent, action):
            latent, reward = super().step(latent, action)
            return latent[:, :3] if "latent" in wrong else latent, reward[:, 1:] if "reward" in wrong else reward

        def predict(self, latent):
            seen = super().predict(latent)
            return seen._replace(**{name: getattr(seen, name)[:, 1:] for name in ("policy", "value") if name in wrong})

    bad = functional(lambda rngs: Wrong(spec, HEADS, network(width=6, head_width=5), rngs))
    with pytest.raises(UserError, match=rf"muzero: {wrong} has the shape .*expected .*Change the network"):
        check_model("muzero", spec, HEADS, bad)
    check_model("muzero", spec, HEADS, net)


@pytest.mark.parametrize("wrong", ["the value of an afterstate", "the policy of chance", "the code of chance"])
def test_a_network_with_a_wrong_output_about_chance_is_named(wrong):
    spec, heads = SPECS["discrete"], HEADS._replace(outcomes=4)

    class Wrong(Model):
        def afterstate(self, latent, action):
            after, said = super().afterstate(latent, action)
            name = {"the value of an afterstate": "value", "the policy of chance": "outcome"}.get(wrong)
            return after, said if name is None else said._replace(**{name: getattr(said, name)[:, 1:]})

        def encode(self, before, after):
            code = super().encode(before, after)
            return code[:, 1:] if "code" in wrong else code

    bad = functional(lambda rngs: Wrong(spec, heads, network(width=6, head_width=5), rngs))
    with pytest.raises(UserError, match=rf"stochastic-muzero: {wrong} has the shape .*expected .*Change the network"):
        check_model("stochastic-muzero", spec, heads, bad)
    good = functional(lambda rngs: Model(spec, heads, network(width=6, head_width=5), rngs))
    check_model("stochastic-muzero", spec, heads, good)


@pytest.mark.parametrize(
    ("heads", "missing"), [(HEADS, "represent"), (HEADS._replace(outcomes=4), "afterstate"), (HEADS, "step")]
)
def test_a_network_without_a_method_is_told_which(heads, missing):
    spec = SPECS["discrete"]
    lacking = type("Lacking", (Model,), {missing: None})
    with pytest.raises(
        UserError, match=rf"x: the network Lacking has no method {missing}; expected .*{missing}.*muzero"
    ):
        check_model("x", spec, heads, functional(lambda rngs: lacking(spec, heads, network(6, 1, 5), rngs)))
