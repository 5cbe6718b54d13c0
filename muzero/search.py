"""Tree search with a learned model: MuZero, Gumbel MuZero and Stochastic MuZero on whole batches.

    from muzero import search

    root = search.RootFnOutput(prior_logits=..., value=..., embedding=...)        # [B, A], [B], [B, ...]
    output = search.gumbel_muzero_policy(params, key, root, recurrent_fn, num_simulations=32)
    output.action, output.action_weights, output.search_tree.summary().value       # [B], [B, A], [B]

The functions have mctx's names, arguments and records, and by default give mctx's results: the same simulations in the
same order, equal actions, weights within 1e-6 (`tests/muzero/search/test_equals_mctx.py`), several times faster
(`benchmarks/README.md`). Where they differ, and why:

- Dirichlet noise goes to legal actions only. mctx mixes it in before it masks, so that with few legal actions most of
  it is lost and its share is not `dirichlet_fraction`. `dirichlet_over="all"` is mctx's way.
- Ties are broken by one draw of noise per search (1e-7 in the prior), instead of one per level and simulation.
- `recurrent_fn` gets keys split from the same key as in mctx, but once per search: a model that draws random numbers
  draws others.
- Actions whose logits are `-inf` or very low are never taken, at the root (where they count as `invalid_actions`) or
  below. No `-inf` enters the arithmetic.
- A root without any legal action is an error where the mask is known before the search is compiled. Inside of a
  compiled program nothing can be raised: there its action is 0, and no other root notices.
- An action without visits is never drawn, whatever the temperature.
- Statistics are float32, whatever the model's dtype.

`gumbel_muzero_policy(mode="rounds")` has no counterpart there: see `muzero.halving`. How the tree is laid out is in
`muzero.tree`, what a simulation does in `muzero.simulate`.

Everything can be jitted (the sizes are static, nothing depends on values) and works on each core's own batch inside
`podracer.mesh.over_cores`. The batch is in the arrays: no `vmap` around it.

Sources: Schrittwieser et al. 2020, "Mastering Atari, Go, chess and shogi by planning with a learned model", appendix B;
Danihelka et al. 2022, "Policy improvement by planning with Gumbel"; Antonoglou et al. 2022, "Planning in stochastic
environments with a learned model". Reference implementation: mctx (Babuschkin et al. 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from mctx import GumbelMuZeroExtraData

from muzero import halving, recurrent, roots, selection
from muzero.qvalues import (
    ILLEGAL,
    Node,
    adapted,
    first_of_highest,
    qtransform_by_min_max,
    qtransform_by_parent_and_siblings,
    qtransform_completed_by_mix_value,
)
from muzero.recurrent import (
    ChanceRecurrentFnOutput,
    DecisionRecurrentFnOutput,
    RecurrentFnOutput,
    RootFnOutput,
    check_recurrent_fn,
    prior,
)
from muzero.simulate import Limits, run, tie_noise
from muzero.tree import SearchSummary, Tree, plant
from podracer.errors import UserError, check_number
from podracer.types import Array

__all__ = [
    "ChanceRecurrentFnOutput",
    "DecisionRecurrentFnOutput",
    "Node",
    "PolicyOutput",
    "RecurrentFnOutput",
    "RootFnOutput",
    "SearchSummary",
    "Tree",
    "check_recurrent_fn",
    "gumbel_muzero_policy",
    "muzero_policy",
    "qtransform_by_min_max",
    "qtransform_by_parent_and_siblings",
    "qtransform_completed_by_mix_value",
    "stochastic_muzero_policy",
]


class PolicyOutput(NamedTuple):
    """What a search proposes."""

    action: Array  # [B] int32
    action_weights: Array  # [B, A] target for the policy network; sums to 1
    search_tree: Tree


def muzero_policy(
    params: Any,
    rng_key: Array,
    root: RootFnOutput,
    recurrent_fn: Callable,
    num_simulations: int,
    invalid_actions: Any = None,
    max_depth: int | None = None,
    loop_fn: Callable = jax.lax.fori_loop,
    *,
    qtransform: Callable = qtransform_by_parent_and_siblings,
    dirichlet_fraction: Any = 0.25,
    dirichlet_alpha: Any = 0.3,
    pb_c_init: Any = 1.25,
    pb_c_base: Any = 19652,
    temperature: Any = 1.0,
    dirichlet_over: Literal["legal", "all"] = "legal",
) -> PolicyOutput:
    """MuZero: PUCT everywhere, Dirichlet noise at the root, an action drawn by visits (Schrittwieser et al. 2020).

    Args:
      params: handed to `recurrent_fn`.
      rng_key: for the noise, the action and the model.
      root: prior logits [B, A], values [B] and embeddings [B, ...].
      recurrent_fn: `(params, rng_key, action, embedding) -> (RecurrentFnOutput, embedding)`, see `muzero.recurrent`.
      num_simulations: nodes added to each tree.
      invalid_actions: [B, A], true or 1 where an action is not possible at the root.
      max_depth: the greatest number of edges to a node; None: no limit.
      loop_fn: runs the simulations; has the arguments of `jax.lax.fori_loop`.
      qtransform: Q-values to the scale of the prior, see `muzero.qvalues`.
      dirichlet_fraction: share of the noise in the prior at the root.
      dirichlet_alpha: its concentration.
      pb_c_init: c1 of PUCT.
      pb_c_base: c2 of PUCT.
      temperature: the action is drawn with probability ~ `visits ** (1 / temperature)`; 0: a most visited one.
      dirichlet_over: "legal": noise over legal actions only. "all": over all, masked afterwards, as mctx does it.

    Returns:
      `action_weights` are the shares of the visits at the root.

    Raises:
      UserError: the root or what `recurrent_fn` returns does not fit.
    """
    limits = Limits(num_simulations, max_depth, loop_fn)
    invalid = roots.check(root, invalid_actions, limits)
    action_key, noise_key, search_key = jax.random.split(rng_key, 3)
    noise = roots.Dirichlet(noise_key, dirichlet_fraction, dirichlet_alpha, dirichlet_over)
    logits = roots.noisy_logits(root.prior_logits, invalid, noise)
    rule = adapted(qtransform)
    expand = recurrent.deterministic(recurrent_fn, params, logits.shape[1])
    ties = tie_noise(search_key, logits.shape)
    tree = plant(roots.node(prior(logits), root), root.embedding, invalid, num_simulations + 1, ties(0))
    select = lambda node: selection.puct(node, rule, pb_c_init, pb_c_base)
    tree = run(search_key, tree, expand, lambda tree, index: select(tree.root), select, limits, ties)
    return PolicyOutput(*roots.draw_by_visits(action_key, tree, temperature), tree)


def stochastic_muzero_policy(
    params: Any,
    rng_key: Array,
    root: RootFnOutput,
    decision_recurrent_fn: Callable,
    chance_recurrent_fn: Callable,
    num_simulations: int,
    invalid_actions: Any = None,
    max_depth: int | None = None,
    loop_fn: Callable = jax.lax.fori_loop,
    *,
    qtransform: Callable = qtransform_by_parent_and_siblings,
    dirichlet_fraction: Any = 0.25,
    dirichlet_alpha: Any = 0.3,
    pb_c_init: Any = 1.25,
    pb_c_base: Any = 19652,
    temperature: Any = 1.0,
    dirichlet_over: Literal["legal", "all"] = "legal",
) -> PolicyOutput:
    """Stochastic MuZero: the player's nodes and chance's in turn (Antonoglou et al. 2022, section 4).

    At the player's nodes PUCT chooses, at chance nodes the outcome that was taken too rarely for its probability.

    Args:
      decision_recurrent_fn: `(params, rng_key, action, state) -> (DecisionRecurrentFnOutput, afterstate)`, with
        `chance_logits` [L, C] and `afterstate_value` [L].
      chance_recurrent_fn: `(params, rng_key, outcome, afterstate) -> (ChanceRecurrentFnOutput, state)`, with
        `action_logits` [L, A], `value`, `reward` and `discount` [L].

    The others are those of `muzero_policy`. Actions and outcomes given to the functions are always in range. In the
    tree, edges are actions or outcomes, as `chance_nodes` says.

    Raises:
      UserError: the root or what the functions return does not fit.
    """
    limits = Limits(num_simulations, max_depth, loop_fn)
    invalid = roots.check(root, invalid_actions, limits)
    action_key, noise_key, search_key = jax.random.split(rng_key, 3)
    noise = roots.Dirichlet(noise_key, dirichlet_fraction, dirichlet_alpha, dirichlet_over)
    logits = roots.noisy_logits(root.prior_logits, invalid, noise)
    model = recurrent.stochastic(decision_recurrent_fn, chance_recurrent_fn, params, root)
    policy = prior(logits, model.width)
    rule = adapted(qtransform)

    def select(node: Node) -> Array:
        player = selection.puct(node, rule, pb_c_init, pb_c_base)
        return jnp.where(node.chance[:, 0] > 0, selection.likely_outcome(node), player)

    ties = tie_noise(search_key, policy.logits.shape)
    tree = plant(roots.node(policy, root), model.embedding, invalid, num_simulations + 1, ties(0))
    tree = run(search_key, tree, model.expand, lambda tree, index: select(tree.root), select, limits, ties)
    return PolicyOutput(*roots.draw_by_visits(action_key, tree, temperature), tree)


def gumbel_muzero_policy(
    params: Any,
    rng_key: Array,
    root: RootFnOutput,
    recurrent_fn: Callable,
    num_simulations: int,
    invalid_actions: Any = None,
    max_depth: int | None = None,
    loop_fn: Callable = jax.lax.fori_loop,
    *,
    qtransform: Callable = qtransform_completed_by_mix_value,
    max_num_considered_actions: int = 16,
    gumbel_scale: Any = 1.0,
    mode: Literal["exact", "rounds"] = "exact",
) -> PolicyOutput:
    """Full Gumbel MuZero: Sequential Halving at the root, the improved policy below (Danihelka et al. 2022).

    Args:
      max_num_considered_actions: how many actions are sampled at the root.
      gumbel_scale: of the noise that samples them; 0 in evaluation where nothing is hidden from the players.
      mode: "exact": one simulation after the other, as mctx. "rounds": whole rounds of Sequential Halving at once, with
        far fewer calls of the model, each on a larger batch (16 simulations: 1 call; 32: 4; 50: 12). See
        `muzero.halving` for what that changes; `loop_fn` is not used then.

    The others are those of `muzero_policy`.

    Returns:
      the action is the best of the most visited ones by `gumbel + logits + q`. `action_weights` are the improved
      policy, `softmax(logits + q)` with completed Q-values.

    Raises:
      UserError: the root or what `recurrent_fn` returns does not fit.
    """
    limits = Limits(num_simulations, max_depth, loop_fn)
    invalid = roots.check(root, invalid_actions, limits)
    check_number("max_num_considered_actions", max_num_considered_actions, minimum=1, whole=True)
    if mode not in ("exact", "rounds"):
        raise UserError(f"mode is {mode!r}; expected 'exact' or 'rounds'. Leave it out for mctx's order.")
    search_key, gumbel_key = jax.random.split(rng_key)
    policy = prior(jnp.where(invalid, ILLEGAL, root.prior_logits))
    gumbel = gumbel_scale * jax.random.gumbel(gumbel_key, invalid.shape, jnp.float32)
    extra = GumbelMuZeroExtraData(root_gumbel=gumbel)  # pyright: ignore[reportCallIssue]
    tree = plant(roots.node(policy, root), root.embedding, invalid, num_simulations + 1, extra_data=extra)
    rule = adapted(qtransform)
    expand = recurrent.deterministic(recurrent_fn, params, invalid.shape[1])
    select = lambda node: selection.improved_policy(node, rule)
    score = lambda tree, considered: selection.halving_score(tree.root, gumbel, rule, considered)
    if mode == "rounds":
        schedule = halving.phases(min(max_num_considered_actions, invalid.shape[1]), num_simulations)
        tree = halving.search_in_rounds(search_key, tree, expand, select, score, schedule, limits)
    else:
        choose = halving.in_order(score, invalid, max_num_considered_actions, num_simulations)
        tree = run(search_key, tree, expand, choose, select, limits)
    found = tree.root
    most = found.visits == jnp.max(found.visits, axis=-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(found.legal, found.logits + rule(found), ILLEGAL))
    return PolicyOutput(first_of_highest(score(tree, most), found), weights, tree)
