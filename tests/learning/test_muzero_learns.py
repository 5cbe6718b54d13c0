"""MuZero learns: Catch with eight simulations and a small network, on both architectures."""

from __future__ import annotations

import json

import pytest

import anakin
import muzero
import sebulba
from launch import cli
from podracer import config, envs, presets
from tests.learning.test_anakin_learns import Curve
from tests.muzero.dice import Dice

pytestmark = [pytest.mark.slow, pytest.mark.loose_rank]

SETTINGS = presets.PRESETS["catch-gumbel-muzero"].config
NETWORK = muzero.network(32, 1, 32)
MAKERS = {
    "muzero": (muzero.muzero, muzero.Config),
    "gumbel": (muzero.gumbel_muzero, muzero.GumbelConfig),
}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param(
            "gumbel",
            {"search": "rounds", "sampling": "prioritised", "value_target": "network", "reanalysed": 32},
            id="gumbel with everything",
            marks=pytest.mark.long,
        ),
        pytest.param("muzero", {"temperature_updates": 200}, id="puct"),
    ],
)
def test_catch_is_solved(name, more):
    """Within 200,000 decisions. Nearly every ball is caught, with the noise of acting."""
    maker, settings = MAKERS[name]
    env, curve = envs.Catch(), Curve()
    agent = maker(env.spec, settings(**(SETTINGS | more)), NETWORK)
    anakin.train(agent, env, total_steps=200_000, batch_per_core=32, cores=1, evaluations=0, sinks=[curve])
    assert curve.at(200_000) >= 0.8


def test_catch_is_solved_on_sebulba():
    """The same agent, unchanged: actor threads search while the other core learns."""
    env, curve = envs.Catch(), Curve()
    agent = muzero.gumbel_muzero(env.spec, muzero.GumbelConfig(**SETTINGS), NETWORK)
    sebulba.train(agent, env, total_steps=280_000, batch_size=32, cores=2, evaluations=0, probe=False, sinks=[curve])
    assert curve.at(280_000) >= 0.8


@pytest.mark.long
def test_pendulum_is_swung_up_with_sampled_actions():
    """Half-way through the preset's run: standing still is about -1,300 and the end about -200, noise included."""
    pytest.importorskip("gymnax")
    env, curve, preset = envs.make("gymnax/Pendulum-v1"), Curve(), presets.PRESETS["pendulum-sampled-muzero"]
    agent = muzero.sampled_muzero(env.spec, muzero.SampledConfig(**preset.config))
    run = preset.settings | {"total_steps": 260_000, "evaluations": 0, "cores": 1}
    anakin.train(agent, env, sinks=[curve], **run)
    assert curve.at(260_000) >= -500


@pytest.mark.long
def test_breakout_is_learnt_faster_than_by_ppo():
    """The first steps of the preset: 16 seeds of PPO have 4.5 at 100,000 steps and 6.3 at 150,000."""
    pytest.importorskip("gymnax")
    preset = presets.PRESETS["breakout-gumbel-muzero"]
    env, curve = envs.make(preset.env), Curve()
    agent = muzero.gumbel_muzero(
        env.spec, muzero.GumbelConfig(**preset.config), config.network_recipe(preset.network, preset.network_config)
    )
    run = preset.settings | {"total_steps": 150_528, "evaluations": 0, "cores": 1}
    anakin.train(agent, env, sinks=[curve], **run)
    assert curve.at(100_352) >= 5.0 and curve.at(150_528) >= 6.8


def test_what_a_die_may_show_is_planned_for():
    """Rolling is worth 1, against 0.25 that are safe, to who has a plan for each side; noise of acting takes little.

    40,000 decisions. The model must have found out that there are at least four outcomes.
    """
    settings = {"num_simulations": 24, "learning_rate": 5e-3, "batch_size": 64, "replay_ratio": 2.0, "min_replay": 512}
    settings |= {"sequence_length": 8, "unroll_steps": 3, "td_steps": 2, "replay_steps": 8_192, "num_outcomes": 16}
    settings |= {"value_limit": 2.0, "value_bins": 21, "reward_limit": 2.0, "reward_bins": 21}
    settings |= {"temperature_updates": 10_000, "dirichlet_alpha": 1.0, "dirichlet_fraction": 0.5}
    env, curve, rows = Dice(), Curve(), []

    class Used:
        def write(self, row):
            rows.append(row.get("outcomes_used"))

        def close(self):
            pass

    agent = muzero.stochastic_muzero(env.spec, muzero.StochasticConfig(**settings), NETWORK)
    run = {"total_steps": 40_000, "batch_per_core": 32, "unroll_length": 8, "cores": 1, "evaluations": 0}
    anakin.train(agent, env, sinks=[curve, Used()], **run)
    assert curve.at(40_000) >= 0.85
    assert [used for used in rows if used is not None][-1] >= 3.5


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["anakin", "sebulba"])
@pytest.mark.parametrize(("env", "bar"), [("catch", 0.95), ("cartpole", 450.0)])
def test_presets_reach_their_bars_on_both_architectures(architecture, env, bar, tmp_path):
    """By the command: the best params on new episodes. The agent is the same."""
    line = ["train", architecture, "--env", env, "--agent", "gumbel-muzero", "--preset", f"{env}-gumbel-muzero"]
    cli.main([*line, *SIZES.get(architecture, []), "--run", str(tmp_path / "run")])
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["absolute_return_mean"] >= bar


SIZES = {"sebulba": ["--batch-size", "32", "--cores", "2", "--no-probe"]}


@pytest.mark.long
def test_tic_tac_toe_is_never_lost(tmp_path, capfd):
    """Against perfect play, from both sides."""
    pytest.importorskip("pgx")
    cli.main(["train", "anakin", "--preset", "tic-tac-toe-alphazero", "--cores", "1", "--run", str(tmp_path / "run")])
    capfd.readouterr()
    cli.main(["eval", str(tmp_path / "run"), "--against", "minimax", "--games", "100", "--json"])
    found = json.loads(capfd.readouterr().out)
    assert len(found["moves_first"]) == len(found["moves_second"]) == 50
    assert min(found["moves_first"] + found["moves_second"]) >= 0, found  # -1 is lost
