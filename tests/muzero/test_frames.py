"""Stacked frames come out of memory as they went in, whatever the environment does at episode starts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muzero.frames import LOST, Packing, Planes
from podracer import envs, specs
from podracer.errors import UserError

T = 9


def stacks(how, stack, seed, batch_size=5, length=T):
    """[batch, T, stack, 3, 2]; episodes start at random times, with older planes made as `how` says."""
    rng = np.random.default_rng(seed)
    found = np.zeros((batch_size, length, stack, 3, 2), np.uint8)
    for b in range(batch_size):
        now = rng.integers(1, 255, (stack, 3, 2))
        for t in range(length):
            if t:
                frame = rng.integers(1, 255, (1, 3, 2))
                begins, older = rng.random() < [0, 0.3, 0.9][b % 3], now[1:]
                if begins:
                    filled = np.repeat(frame, stack - 1, 0)
                    kinds = {"filled": filled, "blank": 0 * older, "goes on": older}
                    kinds["mixed"] = kinds[rng.choice(sorted(kinds))]
                    older = kinds[how]
                now = np.concatenate([older, frame])
            found[b, t] = now
    return found


@pytest.mark.parametrize("last", [False, True], ids=["planes-first", "planes-last"])
@pytest.mark.parametrize("how", ["filled", "blank", "goes on", "mixed"])
@pytest.mark.parametrize("stack", [2, 4])
def test_stacks_are_rebuilt(how, stack, last):
    original = np.concatenate([stacks(how, stack, seed) for seed in range(4)])
    if last:
        original = np.moveaxis(original, 2, -1)
    spec = {"picture": specs.Array(original.shape[2:], np.uint8), "other": specs.Array((2,), np.float32)}
    packing = Packing(spec, stack)
    rng = np.random.default_rng(0)
    other = rng.normal(size=(*original.shape[:2], 2)).astype(np.float32)
    packed = jax.vmap(packing.pack)({"picture": jnp.asarray(original), "other": jnp.asarray(other)})
    assert isinstance(packed["picture"], Planes) and packed["picture"].planes.shape == (20, stack - 1 + T, 3, 2)
    assert float(packing.lost(packed)) == 0
    rows = jnp.asarray(rng.permutation(20)[:7])
    positions = jnp.asarray(rng.integers(0, T, (6, 7)))
    found = jax.jit(packing.unpack)(packed, rows, positions)
    assert found["picture"].dtype == jnp.uint8
    np.testing.assert_array_equal(found["picture"], original[rows[None], positions])
    np.testing.assert_array_equal(found["other"], other[rows[None], positions])


def test_another_way_of_stacking_is_noticed():
    original = stacks("filled", 4, 0)
    original[1, 5, 0] += 1  # an old plane that no rule explains; the stack after it then starts from nowhere, too
    packing = Packing(specs.Array((4, 3, 2), np.uint8), 4)
    packed = jax.vmap(packing.pack)(jnp.asarray(original))
    assert int(jnp.sum(packed.start == LOST)) >= 1 and float(packing.lost(packed)) > 0


def test_observations_without_a_stack_are_refused_or_left_alone():
    with pytest.raises(
        UserError, match=r"frame_stack is 4, .*shapes \[\(3, 8, 8\)\]; expected bytes.*frame_stack to 1"
    ):
        Packing(specs.Array((3, 8, 8), np.uint8), 4)
    with pytest.raises(UserError, match="frame_stack is 4"):
        Packing(specs.Array((4, 8, 8), np.float32), 4)
    assert Packing(specs.Array((5,)), 1).lost(jnp.zeros((2, 5))) == 0


@pytest.mark.parametrize("protocol", ["machado", "classic"])
def test_atari_observations_are_kept_exactly(protocol):
    """envpool fills the stack in a new game and goes on with it after a lost life: rebuilt, byte for byte."""
    pytest.importorskip("envpool")
    game = envs.make("atari/Breakout", protocol=protocol, max_episode_frames=200, image_size=42)
    batch = envs.Envpool(game.task, batch_size=3, atari=game.atari, num_threads=1).start([1, 2, 3])
    rng = np.random.default_rng(0)
    steps = [batch.reset().timestep]
    for _ in range(199):
        steps.append(batch.step(rng.integers(0, game.spec.action.num_values, 3)).timestep)
    batch.close()
    starts = np.stack([step.first for step in steps])[1:]
    assert starts.sum() > 6
    seen = np.stack([np.asarray(step.observation) for step in steps], 1)  # [3, 200, 4, 42, 42]
    packing = Packing(game.spec.observation, 4)
    packed = jax.vmap(packing.pack)(jnp.asarray(seen))
    assert float(packing.lost(packed)) == 0
    positions = jnp.broadcast_to(jnp.arange(200)[:, None], (200, 3))
    found = packing.unpack(packed, jnp.arange(3), positions)
    np.testing.assert_array_equal(np.swapaxes(np.asarray(found), 0, 1), seen)
    assert packed.planes.nbytes < 0.26 * seen.nbytes
