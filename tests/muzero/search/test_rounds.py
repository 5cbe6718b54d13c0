"""Sequential Halving: the schedule, and whole rounds at once against a reference that does one after the other."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest
from mctx._src import seq_halving

from muzero import halving, search
from podracer import mesh
from tests.muzero.search import models, reference


@pytest.mark.parametrize("considered", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("sims", [1, 7, 16, 17, 50, 200])
def test_a_schedule_spends_the_budget_and_halves(considered, sims):
    schedule = halving.phases(considered, sims)
    assert sum(phase.survivors * phase.rounds for phase in schedule) == sims
    survivors = [phase.survivors for phase in schedule]
    assert survivors == sorted(survivors, reverse=True) and survivors[0] == min(considered, sims)
    assert all(later <= max(2, earlier // 2) for earlier, later in itertools.pairwise(survivors))


@pytest.mark.parametrize("considered", [*range(1, 42), 50, 64, 82, 100, 128])
def test_the_schedule_is_mctxs(considered):
    """For every budget, also one that ends in the middle of a phase."""
    for sims in (*range(1, 140), 200, 256, 400):
        theirs = seq_halving.get_sequence_of_considered_visits(considered, sims)
        ours = halving.considered_visits(considered, sims)[considered]
        np.testing.assert_array_equal(ours, theirs, err_msg=f"{considered} actions, {sims} simulations")


def test_known_schedules():
    assert halving.phases(16, 50) == ((16, 1), (8, 1), (4, 3), (2, 7))
    assert [halving.num_rounds(16, sims) for sims in (16, 32, 50)] == [1, 4, 12]
    assert halving.considered_visits(4, 8)[4].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert halving.considered_visits(4, 4)[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("actions", "considered", "sims", "depth", "discounts"),
    [(6, 4, 23, 23, (0.97,)), (5, 16, 20, 2, (-1.0,)), (4, 3, 12, 12, (0.0, 1.0, -1.0)), (3, 1, 4, 4, (0.9,))],
)
def test_rounds_equal_halving_with_survivors_fixed_at_the_start_of_a_phase(actions, considered, sims, depth, discounts):
    batch, trials = 8, 3
    policy = partial(
        search.gumbel_muzero_policy,
        recurrent_fn=models.table_step,
        num_simulations=sims,
        max_num_considered_actions=considered,
        max_depth=depth,
        mode="rounds",
    )
    run = mesh.compiled_quickly(lambda model, key, root, invalid: policy(model, key, root, invalid_actions=invalid))
    for seed in range(trials):
        model, rng = models.table(seed, 50, actions, discounts), np.random.default_rng(seed)
        # Also fewer legal actions than considered, at least one.
        invalid = (rng.random((batch, actions)) < 0.4 * (seed > 0)) & (np.arange(actions) != seed % actions)
        root = models.table_root(model, np.arange(batch))
        output = run(jax.tree.map(jnp.asarray, model), jax.random.PRNGKey(seed), root, jnp.asarray(invalid))
        found, gumbel = output.search_tree.summary(), output.search_tree.extra_data.root_gumbel
        for b in range(batch):
            expected = reference.search(
                model, b, np.asarray(gumbel[b]), ~invalid[b], min(considered, actions), sims, depth
            )
            assert output.action[b] == expected[0]
            np.testing.assert_allclose(output.action_weights[b], expected[1], atol=2e-5)
            np.testing.assert_array_equal(found.visit_counts[b], expected[2])
            np.testing.assert_allclose(found.value[b], expected[3], atol=1e-5)


X86 = platform.machine() == "x86_64"


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--xla_cpu_max_isa=AVX2"] if X86 else [""], ids=lambda flags: flags or "all")
def test_so_they_do_as_users_compile_them(flags):
    """The test before this one by the code generator that users get, for this processor and one without AVX-512."""
    environment = os.environ | {"COMPILE_AS_USERS": "1", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "halving_with_survivors", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize(("sims", "calls"), [(16, 1), (32, 4)])
def test_serial_calls_of_the_model(sims, calls):
    """Counted while it runs."""
    model = jax.tree.map(jnp.asarray, models.table(0, 20, 18))
    root, counted = models.table_root(model, np.arange(2)), []

    def step(*args):
        jax.debug.callback(lambda: counted.append(1))
        return models.table_step(*args)

    policy = partial(search.gumbel_muzero_policy, recurrent_fn=step, num_simulations=sims, mode="rounds")
    output = mesh.compiled_quickly(policy)(model, jax.random.PRNGKey(0), root)
    visits = output.search_tree.summary().visit_counts
    jax.effects_barrier()
    assert len(counted) == calls
    assert np.all(np.sum(visits, axis=-1) == sims)


@pytest.mark.loose_rank
def test_rounds_mostly_take_the_action_of_the_exact_order():
    """The scores of the exact order drift within a phase; in rounds they stand still."""
    batch, sims = 400, 32
    model = jax.tree.map(jnp.asarray, models.table(7, batch, 18))
    root, key = models.table_root(model, np.arange(batch)), jax.random.PRNGKey(1)
    rounds = partial(search.gumbel_muzero_policy, recurrent_fn=models.table_step, num_simulations=sims, mode="rounds")
    exact = partial(mctx.gumbel_muzero_policy, recurrent_fn=models.table_step, num_simulations=sims)
    actions = [mesh.compiled_quickly(policy)(model, key, root).action for policy in (rounds, exact)]
    assert np.mean(actions[0] == actions[1]) > 0.9
