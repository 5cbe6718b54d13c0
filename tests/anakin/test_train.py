"""`anakin.train`: exact counts, evaluation on the side, best params, refusals before anything is written, NaN."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import anakin
from podracer import envs
from podracer.checkpoint import Checkpoints
from podracer.errors import UserError
from podracer.evaluate import Evaluator
from podracer.runs import NonFiniteLoss
from tests.anakin import tiny

TOTAL = 500  # not a multiple of the 80 steps per call: 7 calls, 560 steps


def train(rows=None, env=None, agent=None, cores=2, **changes):
    env = tiny.catch() if env is None else env
    settings = {"total_steps": TOTAL, "evaluations": 3, **tiny.SIZES, **changes}
    sinks = [] if rows is None else [rows]
    run_dir, settings = settings.pop("run_dir", None), settings
    return anakin.train(agent or tiny.a2c(env), env, cores=cores, run_dir=run_dir, sinks=sinks, **settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run with all that belongs to it, and its rows."""
    rows = tiny.Rows()
    run = train(rows, run_dir=tmp_path_factory.mktemp("runs") / "new" / "run")
    return run, rows


def test_steps_frames_and_updates_are_exact_and_the_total_is_rounded_up_to_whole_calls(finished):
    """7 calls of 2 updates of 2 x 4 x 5 steps."""
    run, rows = finished
    assert run.steps == 560
    assert [row["steps"] for row in rows.training] == [80 * n for n in range(1, 8)]
    assert [row["updates"] for row in rows.training] == [2 * n for n in range(1, 8)]
    assert all(row["frames"] == row["steps"] for row in rows.training)
    assert int(run.state.updates) == 14
    assert int(run.params.updates) == 14


def test_frames_are_steps_times_the_frame_skip():
    """An environment that repeats each action four times says so in every row."""

    class Skipping(envs.Catch):
        @property
        def spec(self):
            return dataclasses.replace(super().spec, frame_skip=4)

    rows = tiny.Rows()
    train(rows, env=Skipping(rows=5, columns=3), total_steps=80, evaluations=0)
    (row,) = rows.rows
    assert (row["steps"], row["frames"]) == (80, 320)
    assert row["frames_per_s"] == pytest.approx(4 * row["steps_per_s"])


def test_every_row_has_its_speed_and_the_speeds_add_up_to_the_training_time(finished):
    """Seconds per call follow from each row's speed; their sum is `train_s`, which leaves evaluations out."""
    _, rows = finished
    seconds = np.cumsum([tiny.STEPS_PER_CALL / row["steps_per_s"] for row in rows.training])
    np.testing.assert_allclose([row["train_s"] for row in rows.training], seconds, atol=2e-3)
    assert all(row["frames_per_s"] == row["steps_per_s"] for row in rows.training)


def test_calls_before_an_evaluation_are_not_faster_than_the_others():
    """A CPU finishes a call before `step` returns; its time must not be booked on the call before."""
    rows = tiny.Rows()
    train(rows, total_steps=80 * 40, updates_per_call=2, evaluations=10)
    stops = {row["steps"] for row in rows.evaluations}
    assert len(stops) == 10
    speeds = {at: [r["steps_per_s"] for r in rows.training if (r["steps"] in stops) == at] for at in (True, False)}
    assert np.median(speeds[True]) < 4 * np.median(speeds[False])


def test_returns_are_absent_before_the_first_episode_has_ended_and_not_zero():
    """Catch with 12 rows ends after 11 steps; one update sees 5."""
    rows = tiny.Rows()
    train(rows, env=envs.Catch(rows=12, columns=3), updates_per_call=1, total_steps=160, evaluations=0)
    has = ["return_mean" in row for row in rows.training]
    assert has == [False, False, True, True]
    assert "episodes" not in rows.training[0]
    assert rows.training[2]["episodes"] == 8
    assert rows.training[2]["episode_length_mean"] == 11


def test_evaluations_fall_on_whole_calls_and_each_leaves_a_checkpoint(finished):
    """Three evaluations of seven calls, the last at the end; the newest two checkpoints stay."""
    run, rows = finished
    assert [row["steps"] for row in rows.evaluations] == [160, 400, 560]
    assert Checkpoints(run.directory / "checkpoints").steps() == [400, 560]
    assert all(row["eval_episodes"] == 8 for row in rows.evaluations)
    assert rows.closed


def test_the_best_params_are_those_that_were_measured(finished):
    """The best checkpoint evaluates to its score, to the highest evaluation of the run, on the same episodes."""
    run, rows = finished
    best = Checkpoints(run.directory / "best", 1)
    meta = best.meta()
    assert meta["score"] == max(row["eval_return_mean"] for row in rows.evaluations) == run.best_score
    last = [row["steps"] for row in rows.evaluations if row["eval_return_mean"] == meta["score"]][-1]
    assert meta["steps"] == meta["chosen_at"] == last == run.best_steps
    params = best.params(jax.eval_shape(run.agent.initial_learner_state, jax.random.key(0)).params)
    best.close()
    tiny.assert_same(params, run.best_params)
    again = run.evaluate(episodes=8, seed=run.settings.seed + 1, params=params)
    assert again.returns.mean() == run.best_score


def test_the_best_params_are_measured_once_more_on_ten_times_as_many_new_episodes(finished):
    """The absolute metric: the last row, on a seed of its own."""
    run, rows = finished
    row = rows.rows[-1]
    assert row["absolute_episodes"] == 80
    again = run.evaluate(episodes=80, seed=run.settings.seed + 2, params=run.best_params)
    assert row["absolute_return_mean"] == pytest.approx(again.returns.mean(), abs=1e-5)
    assert run.absolute_score == again.returns.mean()


def test_the_run_directory_says_how_to_repeat_the_run(finished):
    """config.json: recipe, settings, versions, commit, devices; metrics.jsonl: the rows that sinks saw."""
    run, rows = finished
    content = json.loads((run.directory / "config.json").read_text())
    assert content["architecture"] == "anakin"
    assert content["recipe"]["env"] == "catch"
    assert content["recipe"]["env_options"] == {"rows": 5, "columns": 3}
    assert content["settings"]["total_steps"] == TOTAL
    assert content["num_cores"] == 2
    assert content["versions"]["jax"] == jax.__version__
    assert {"command", "git_commit", "devices", "started"} <= set(content)
    assert [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()] == rows.rows


@pytest.mark.parametrize("changes", [{"evaluations": 0}, {"updates_per_call": 1, "total_steps": 560}])
def test_evaluations_and_the_size_of_calls_change_no_bit_of_the_training(finished, changes):
    """The whole state after 14 updates: params, optimizer, environments, key."""
    run, _ = finished
    tiny.assert_same(train(**changes).state, run.state)


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
    """Not even with evaluations."""
    monkeypatch.chdir(tmp_path)
    run = train(total_steps=80, evaluations=1)
    assert run.best_params is not None
    assert list(tmp_path.iterdir()) == []


def test_no_evaluations_still_leave_checkpoints_along_the_way(tmp_path):
    """A run of ten calls without evaluations can be resumed from its middle."""
    train(run_dir=tmp_path / "run", evaluations=0, total_steps=800, keep=20)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [80 * n for n in range(1, 11)]
    assert not (tmp_path / "run" / "best").exists()


def test_only_the_newest_checkpoints_stay(tmp_path):
    """`keep` of them."""
    train(run_dir=tmp_path / "run", keep=1)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [560]


def test_metrics_keep_no_buffers_on_the_device():
    """As many live arrays after 39 calls as after 5, and a call's metrics are a number per update."""

    class Counting(tiny.Rows):
        def write(self, row):
            super().write({**row, "live": len(jax.live_arrays())})

    rows = Counting()
    run = train(rows, total_steps=80 * 40, evaluations=0)
    assert rows.rows[4]["live"] == rows.rows[-2]["live"]  # both while the next call is under way
    _, metrics = run.loop.step(run.state)
    assert {leaf.shape for leaf in jax.tree.leaves(metrics)} == {(2,)}


# Many runs in one program


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """Two learning rates times two seeds, on two cores."""
    rows = tiny.Rows()
    directory = tmp_path_factory.mktemp("runs") / "members"
    run = train(rows, seeds=2, sweep={"learning_rate": [1e-2, 0.0]}, run_dir=directory, total_steps=160, evaluations=2)
    return run, rows


def test_members_have_rows_of_their_own_with_steps_of_one_run(members):
    """Each call gives four rows; 4 x 5 steps per update, as each member lives on one core."""
    run, rows = members
    assert run.steps == 160
    assert [row["member"] for row in rows.training] == [0, 1, 2, 3] * 4
    assert [row["steps"] for row in rows.training] == [n for n in (40, 80, 120, 160) for _ in range(4)]
    assert [row["updates"] for row in rows.training[::4]] == [2, 4, 6, 8]
    rates = [row["learning_rate"] for row in rows.training[:4]]
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.0, 0.0], rtol=1e-6)


def test_members_are_evaluated_each_for_itself(members):
    """Scores, best params and the absolute metric have an axis of members; a rate of 0 never changes its score."""
    run, rows = members
    scores = np.asarray([row["eval_return_mean"] for row in rows.evaluations]).reshape(2, 4)
    np.testing.assert_allclose(scores.max(0), run.best_score, atol=1e-6)
    np.testing.assert_array_equal(scores[0, 2:], scores[1, 2:])
    assert run.best_steps.tolist()[2:] == [160, 160]  # the later of equals
    assert run.absolute_score.shape == (4,)
    absolute = [row for row in rows.rows if "absolute_return_mean" in row]
    assert [row["member"] for row in absolute] == [0, 1, 2, 3]
    initial = jax.tree.map(np.asarray, run.loop.init(0).learner.params.weights)
    tiny.assert_same(*(jax.tree.map(lambda leaf: np.asarray(leaf)[2:], w) for w in (initial, run.params.weights)))


@pytest.mark.parametrize(
    "sweep, says",
    [
        (("learning_rat=1e-3",), "learning_rat"),
        (("learning_rate",), "name=v1,v2"),
        (("learning_rate=",), "name=v1,v2"),
        (("learning_rate=fast",), "name=v1,v2"),
        (("learning_rate=1e-3,-1",), "learning_rate is -1"),
        (("learning_rate=nan",), "learning_rate is nan"),
        (("n_step=2",), "not a float"),
        (("learning_rate=1", "learning-rate=2"), "twice"),
    ],
)
def test_sweeps_that_cannot_be_read_say_what_was_expected(sweep, says, tmp_path):
    """Names, numbers and the config's own checks; nothing is written."""
    with pytest.raises(UserError, match=says):
        train(sweep=sweep, run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# Refusals


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"total_step": 5}, "unknown setting 'total_step'.*total_steps"),
        ({"total_steps": 0}, "total_steps is 0"),
        ({"batch_per_core": -1}, "batch_per_core is -1"),
        ({"unroll_length": 0}, "unroll_length is 0"),
        ({"eval_episodes": 0}, "eval_episodes is 0"),
        ({"keep": 0}, "keep is 0"),
        ({"evaluations": -1}, "evaluations is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is"),
        ({"seed": 2**32 - 1, "seeds": 2}, "seed is"),
        ({"starts": "optimistic"}, "optimistic_ratio"),
        ({"starts": "hot"}, "unknown starts 'hot'"),
        ({"nan": "ignore"}, "unknown nan 'ignore'"),
        ({"total_steps": 2.5}, "total_steps is 2.5; expected a whole number"),
        ({"prng": "threefry"}, "unknown prng 'threefry'. Did you mean 'threefry2x32'"),
        ({"cores": 9}, "cores is 9"),
        ({"cores": 0}, "cores is 0"),
    ],
)
def test_settings_that_cannot_work_are_named_and_leave_no_directory(changes, says, tmp_path):
    """Before anything is compiled."""
    with pytest.raises(UserError, match=says):
        train(run_dir=tmp_path / "run", **changes)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_refused_before_anything_is_traced(tmp_path, monkeypatch):
    """It would take minutes to learn it later."""
    monkeypatch.setattr(anakin.Anakin, "check", lambda self: pytest.fail("traced"))
    with pytest.raises(UserError, match=r"exists.*resume"):
        train(run_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_files_for_which_there_is_no_directory_are_refused(name):
    """Rather than not written."""
    with pytest.raises(UserError, match=f"{name} is on, but there is no run directory"):
        train(**{name: True})


def test_the_largest_seed_trains_and_evaluates():
    """Evaluations use seeds beside it, which wrap around."""
    assert math.isfinite(train(seed=2**32 - 1, total_steps=80, evaluations=1).best_score)


# NaN


def poisoned(nan="stop", rows=None, run_dir=None, **where):
    """Step 18 is bad: update 4 of unrolls of 5, the first of call 2 of three updates (120 steps each)."""
    env = tiny.Poisoned(**where)
    sizes = {"updates_per_call": 3, "total_steps": 480, "evaluations": 4, "nan": nan}
    return train(rows, env=env, run_dir=run_dir, **sizes)


@pytest.mark.parametrize("reward, at", [(True, 18), (False, 17), (False, 20)])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_update(tmp_path, reward, at):
    """The checkpoint from before it stays, with finite params, and can be read."""
    with pytest.raises(NonFiniteLoss, match=r"update 4 .*checkpoints in .* are from before it") as caught:
        poisoned(run_dir=tmp_path / "run", reward=reward, at=at)
    assert caught.value.update == 4
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps() == [120]
    env = tiny.Poisoned()
    like = jax.eval_shape(tiny.a2c(env).initial_learner_state, jax.random.key(0)).params
    params = checkpoints.params(like)
    checkpoints.close()
    assert int(params.updates) == 3
    assert all(np.isfinite(leaf).all() for leaf in tiny.leaves(params))


def test_updates_that_are_not_finite_can_be_skipped_and_counted(tmp_path):
    """The run goes to its end; only that update left no trace in the weights; files have no NaN."""
    rows = tiny.Rows()
    run = poisoned("skip", rows, tmp_path / "run")
    assert run.steps == 480
    assert [row["nonfinite_updates"] for row in rows.training] == [0, 1, 0, 0]
    assert all(np.isfinite(leaf).all() for leaf in tiny.leaves(run.params))

    def refuse(constant):
        raise AssertionError(constant)

    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_an_agent_that_does_not_count_bad_updates_is_stopped_all_the_same():
    """Any number among its metrics that is not finite tells."""
    env = tiny.Poisoned()
    agent = tiny.a2c(env)

    def silent(*arguments):
        state, metrics = agent.learner_step(*arguments)
        return state, {"loss": metrics["loss"]}

    with pytest.raises(NonFiniteLoss) as caught:
        train(env=env, agent=dataclasses.replace(agent, learner_step=silent), evaluations=0)
    assert caught.value.update == 4


def test_a_score_that_is_not_a_number_is_beaten_by_any_other(monkeypatch):
    """Evaluations that gave NaN must not stay the best for good."""
    sick = iter([np.nan, 1.0, np.nan, 2.0, 0.0])
    measure = Evaluator.__call__

    def measured(self, params, seed=0):
        result = measure(self, params, seed)
        return result._replace(returns=np.full_like(result.returns, next(sick, 5.0)))

    monkeypatch.setattr(Evaluator, "__call__", measured)
    run = train(total_steps=400, evaluations=5)
    assert (run.best_score, run.best_steps) == (2.0, 320)
