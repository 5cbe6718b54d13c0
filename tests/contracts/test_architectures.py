"""Every agent runs unchanged on both architectures, whatever its actions, observations and network."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from anakin.loop import Anakin
from podracer.envs.host import on_host
from sebulba.lag import Lag
from sebulba.loop import Sebulba
from sebulba.topology import split
from tests.contracts.agents import CASES, SPECS, B, Case, T, make_case
from tests.contracts.noise import Noise


def each_case(*kinds):
    """Compiling takes seconds per case: all agents on some kinds, one on the others."""
    chosen = [case for case in CASES if (case.network, case.spec) in kinds]
    chosen += [case for case in CASES if (case.agent, case.network, case.spec) == ("ppo", "mlp", "continuous")]
    # Planners compile longest: one case of each.
    own = {
        "gumbel-muzero": "dict",
        "stochastic-muzero": "dict",
        "sampled-muzero": "continuous",
        "alphazero": "modelled",
    }
    chosen += [
        case for case in CASES if own.get(case.agent) == case.spec and (case.agent != "alphazero" or case.normalise)
    ]
    return pytest.mark.parametrize("case", chosen, ids=str)


def check(first, params, metrics):
    assert all(np.all(np.isfinite(leaf)) for leaf in metrics.values()), metrics
    weights = lambda p: jax.tree.leaves(jax.device_get(p.weights))
    assert any(np.any(a != b) for a, b in zip(weights(first), weights(params), strict=True))
    assert all(np.all(np.isfinite(leaf)) for leaf in weights(params))


@each_case(("mlp", "dict"))
def test_on_anakin(case: Case):
    agent, env = make_case(case), Noise(SPECS[case.spec])
    loop = Anakin(agent, env, B // 2, T, updates_per_call=3, num_cores=2)
    state = loop.init(0)
    first = jax.device_get(state.learner.params)
    state, _ = loop.step(state)
    state, metrics = loop.step(state)  # what comes out fits what goes in
    check(first, state.learner.params, jax.device_get(metrics.learner))
    assert np.sum(metrics.episodes.count) > 0


@each_case(("mlp", "dict"), ("lstm", "discrete"))
def test_on_sebulba(case: Case):
    agent, env = make_case(case), on_host(Noise(SPECS[case.spec]), B)
    system = Sebulba(agent, env, split(3, 1, 2, B), T, Lag.parse("fixed"))
    system.check()
    first, updates = jax.device_get(system.learner.state.params), []
    system.run(3, lambda update: bool(updates.append(update)))
    assert len(updates) == 3 and sum(len(update.episodes) for update in updates) > 0
    check(
        first, system.learner.state.params, {k: np.asarray([u.metrics[k] for u in updates]) for k in updates[0].metrics}
    )
