"""Resume: as if the run had never stopped, in a new process, on other cores, after signals and after a kill."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import anakin
from podracer import agents, envs, networks
from podracer.checkpoint import Checkpoints
from podracer.errors import UserError
from tests.anakin import tiny

SIZES = {**tiny.SIZES, "evaluations": 2}
STEPS = 160  # two calls


def agent(name, network=tiny.NETWORK, **config):
    maker = getattr(agents, name)
    return lambda env: maker(env.spec, dataclasses.replace(maker.__defaults__[0], **config), network)


AGENTS = {
    "a2c": agent("a2c"),
    "impala": agent("impala"),
    "ppo": agent("ppo", minibatches=2, epochs=2),
    "pqn": agent("pqn", minibatches=2, epochs=2),
    # Everything that a state can have: memory of the network, moments of observations and returns.
    "recurrent": agent(
        "ppo",
        networks.recurrent("lstm", 4, tiny.NETWORK),
        minibatches=2,
        epochs=1,
        normalize_observations=True,
        normalize_rewards=True,
        anneal_steps=1000,
    ),
    "replay": tiny.planner,
}

RESUME = """
import pathlib, sys
import numpy as np
from podracer import mesh

mesh.start_backend("cpu", 8)
import anakin
from tests.anakin import tiny

for directory in sys.argv[2:]:
    run = anakin.resume(directory, cores=2, total_steps=int(sys.argv[1]), sinks=[])
    np.savez(pathlib.Path(directory) / "state.npz", *tiny.leaves(run.state))
"""


def environment():
    """For subprocesses: the same compilation cache."""
    found = {**os.environ, "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    found |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05", "PYTHONPATH": os.getcwd()}
    return found


def env_of(name):
    return envs.CartPole(max_steps=12) if name == "recurrent" else tiny.catch()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """`{agent: (leaves of a run of 2N, leaves of one of N that another process brought to 2N)}`."""
    folder = tmp_path_factory.mktemp("runs")
    straight = {}
    for name, make in AGENTS.items():
        env = env_of(name)
        anakin.train(make(env), env, cores=2, run_dir=folder / name, total_steps=STEPS, sinks=[], **SIZES)
        run = anakin.train(make(env), env, cores=2, total_steps=2 * STEPS, sinks=[], **SIZES)
        straight[name] = tiny.leaves(run.state)
    command = [sys.executable, "-c", RESUME, str(2 * STEPS), *(str(folder / name) for name in AGENTS)]
    subprocess.run(command, check=True, env=environment(), timeout=500)
    after = {name: list(np.load(folder / name / "state.npz").values()) for name in AGENTS}
    return {name: (straight[name], after[name]) for name in AGENTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(AGENTS))
def test_a_run_that_goes_on_in_a_new_process_is_the_run_that_never_stopped(resumed, name):
    """Params, optimizer, environments, episodes, key and counters after 2N steps, bit for bit."""
    straight, after = resumed[name]
    assert len(straight) == len(after) > 15
    for one, other in zip(straight, after):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def timeless(rows):
    """Rows without what a clock says."""
    clock = ("train_s", "steps_per_s", "frames_per_s")
    return [{name: value for name, value in row.items() if name not in clock} for row in rows]


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def train(directory, sinks=(), cores=2, env=None, **changes):
    env = env or tiny.catch()
    settings = {**SIZES, "total_steps": 400, **changes}
    return anakin.train(tiny.a2c(env), env, cores=cores, run_dir=directory, sinks=sinks, **settings)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of five calls that nobody disturbs, evaluated after the second and the fifth."""
    directory = tmp_path_factory.mktemp("runs") / "straight"
    return train(directory), rows_of(directory)


@dataclasses.dataclass
class Signalling:
    """A sink that sends a signal to this process when it sees a row."""

    steps: int
    signal: int

    def write(self, row):
        if row["steps"] == self.steps and "updates" in row:
            os.kill(os.getpid(), self.signal)

    def close(self):
        pass


@pytest.mark.parametrize("steps", [80, 160, 240, 320])
def test_wherever_a_signal_falls_the_rows_and_the_best_params_are_those_of_an_undisturbed_run(
    straight, tmp_path, steps
):
    """Also where an evaluation was due, or had just been made, and at the very end."""
    run, rows = straight
    number = signal.SIGTERM if steps % 160 else signal.SIGINT
    expected = SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    before = signal.getsignal(number)
    with pytest.raises(expected, match=r"75|stopped at .* steps"):
        train(tmp_path / "run", [Signalling(steps, number)])
    assert signal.getsignal(number) is before
    again = anakin.resume(tmp_path / "run", cores=2, sinks=[])
    tiny.assert_same(again.state, run.state)
    tiny.assert_same(again.best_params, run.best_params)
    assert (again.best_score, again.best_steps) == (run.best_score, run.best_steps)
    assert again.absolute_score == run.absolute_score
    assert timeless(rows_of(tmp_path / "run")) == timeless(rows)


def test_rows_that_a_killed_run_wrote_after_its_last_checkpoint_appear_once(straight, tmp_path):
    """Killed between checkpoints, in the middle of a line; the time of training goes on, too."""
    _, rows = straight
    directory = tmp_path / "run"
    with pytest.raises(SystemExit):
        train(directory, [Signalling(80, signal.SIGTERM)])
    at = Checkpoints(directory / "checkpoints").steps()[-1]
    with open(directory / "metrics.jsonl", "a") as file:
        lost = [row for row in rows if row["steps"] > at and "updates" in row]
        file.write("".join(json.dumps({**row, "loss": 1e9}) + "\n" for row in lost[:2]) + '{"steps": 3')
    anakin.resume(directory, cores=2, sinks=[])
    found = rows_of(directory)
    assert timeless(found) == timeless(rows)
    seconds = [row["train_s"] for row in found if "train_s" in row]
    assert seconds == sorted(seconds) and len(seconds) == 5


@pytest.mark.slow
def test_other_numbers_of_cores_go_on_with_the_same_environments(tmp_path):
    """8, then 2, then 1 cores: 8 environments, counters and episodes that go on, falling to no wrong sizes."""
    directory = tmp_path / "run"
    sizes = {"batch_per_core": 1, "evaluations": 1}
    run = train(directory, cores=8, total_steps=160, **sizes)
    for cores, total in ((2, 320), (1, 480)):
        state = run.state
        run = anakin.resume(directory, cores=cores, total_steps=total, sinks=[])
        assert run.loop.num_cores == cores
        assert run.loop.batch_per_core == 8 // cores
        assert (run.steps, int(run.state.updates)) == (total, total // 40)
        assert run.state.timestep.first.shape == (8,)
        tiny.assert_same(run.state.key, state.key)
    training = [row for row in rows_of(directory) if "updates" in row]
    assert [row["steps"] for row in training] == [80 * n for n in range(1, 7)]
    episodes = [row["episodes"] for row in training]
    assert episodes == [8 * (10 * n // 4) for n in range(1, 7)]  # every fourth step of an environment ends one


def test_environments_that_do_not_divide_over_the_cores_are_named(tmp_path):
    """8 environments on 3 cores."""
    train(tmp_path / "run", total_steps=80)
    with pytest.raises(UserError, match=r"number of environments = 8 .* cores = 3"):
        anakin.resume(tmp_path / "run", cores=3, total_steps=160)


@pytest.mark.slow
def test_a_replay_begins_empty_on_other_cores(tmp_path, capfd):
    """All else goes on: params, optimizer, target network, counters. On as many cores the replay does, too."""
    env, directory = tiny.catch(), tmp_path / "run"
    first = anakin.train(
        tiny.planner(env), env, cores=2, run_dir=directory, total_steps=80, sinks=[], evaluations=0, **tiny.SIZES
    )
    assert np.all(np.asarray(first.state.learner.memory.count) > 0)
    copy = shutil.copytree(directory, tmp_path / "copy")
    run = anakin.resume(copy, cores=2, total_steps=160, sinks=[])
    assert run.steps == 160 and run.state.learner.memory.count.tolist() == [10, 10]
    steps = 80
    for cores in (4, 2):
        before, run = steps, anakin.resume(directory, cores=cores, total_steps=steps + 40)
        steps = run.steps
        text = capfd.readouterr().err
        assert f"{cores}: it begins empty" in text and "replay was kept on" in text
        assert run.state.learner.memory.count.shape == (cores,)
        assert np.sum(np.asarray(run.state.learner.memory.count)) * 5 == steps - before  # what it has acted since
        assert int(run.state.learner.slow.gradient_steps) > 0  # counted from the beginning


@pytest.mark.slow
def test_members_go_on_each_for_itself(tmp_path):
    """Two seeds times two learning rates, bit for bit."""
    many = {"seeds": 2, "sweep": ("learning_rate=1e-2,1e-3",), "evaluations": 2}
    run = train(None, total_steps=160, **many)
    train(tmp_path / "run", total_steps=80, **many)
    again = anakin.resume(tmp_path / "run", cores=2, total_steps=160, sinks=[])
    tiny.assert_same(again.state, run.state)
    rows = [(row["steps"], row["member"]) for row in rows_of(tmp_path / "run") if "updates" in row]
    assert rows == [(steps, member) for steps in (40, 80, 120, 160) for member in range(4)]
    np.testing.assert_array_equal(again.best_steps.shape, (4,))


@pytest.mark.slow
def test_a_run_of_python_objects_goes_on_with_the_same_objects_or_is_refused(tmp_path):
    """A `Batch` with a mode of its own has no name; config.json says so, and so does the message."""
    batch = envs.Batch(tiny.catch(), mode="next-step")
    run = anakin.train(tiny.a2c(), batch, cores=2, run_dir=tmp_path / "run", total_steps=80, sinks=[], **SIZES)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"] is None
    with pytest.raises(UserError, match="Python objects"):
        anakin.resume(tmp_path / "run", total_steps=160)
    again = anakin.resume(tmp_path / "run", cores=2, total_steps=160, agent=run.agent, env=batch, sinks=[])
    assert again.steps == 160
    assert again.loop.batch.next_step


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A finished run of one call, to be copied."""
    directory = tmp_path_factory.mktemp("runs") / "stopped"
    train(directory, total_steps=80, evaluations=1)
    return directory


@pytest.fixture
def copy(stopped, tmp_path):
    import shutil

    return shutil.copytree(stopped, tmp_path / "run")


def refusal(directory, **changes):
    with pytest.raises(UserError) as caught:
        anakin.resume(directory, cores=2, sinks=[], **{"total_steps": 160, **changes})
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


def edit(directory, change):
    path = directory / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_finished_run_is_refused_and_says_how_to_go_on(copy):
    """A larger end, and the same rows as before."""
    rows = rows_of(copy)
    assert "is finished" in refusal(copy, total_steps=None)
    assert "--total-steps" in refusal(copy, total_steps=80)
    assert rows_of(copy) == rows
    assert anakin.resume(copy, cores=2, total_steps=81, sinks=[]).steps == 160


def test_a_run_stays_the_one_that_it_is(copy):
    """What may differ is named."""
    assert "batch_per_core cannot change in a run; expected one of total_steps" in refusal(copy, batch_per_core=2)


def test_a_checkpoint_of_another_network_is_one_sentence(copy):
    """The shape that differs is named, and nothing is changed."""
    edit(copy, lambda content: content["recipe"]["network_config"].update(hidden=[16]))
    rows = rows_of(copy)
    assert "expected float32[" in refusal(copy)
    assert rows_of(copy) == rows


def test_a_checkpoint_of_another_environment_is_one_sentence(copy):
    """Catch with another board."""
    edit(copy, lambda content: content["recipe"].update(env_options={"rows": 7, "columns": 3}))
    assert "expected float32[" in refusal(copy)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["params/d/*", "state/d/*", "params/manifest.ocdbt"])
def test_damaged_checkpoints_are_one_sentence(copy, what):
    """Params, the rest of the state, and the table of contents, overwritten."""
    for path in (copy / "checkpoints" / "80").glob(what):
        path.write_bytes(b"garbage")
    assert "cannot be read" in refusal(copy)
    # Orbax leaves arrays that it was reading behind, and Python complains when it collects them: not in the next test.
    time.sleep(0.2)
    gc.collect()


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda c: c.update(architecture="sebulba"), "run of sebulba"),
        (lambda c: c.pop("settings"), "lacks the settings"),
        (lambda c: c.pop("recipe"), "lacks the settings and recipe"),
        (lambda c: c["recipe"].pop("agent"), "recipe has the fields"),
        (lambda c: c["recipe"].update(agent="pp0"), "unknown agent 'pp0'"),
        (lambda c: c["settings"].update(speed=3), "unknown setting 'speed'"),
        (lambda c: c["recipe"]["agent_config"].update(zeta=3), "unknown agent setting 'zeta'"),
    ],
)
def test_a_config_that_is_not_this_ones_is_one_sentence(copy, change, says):
    """Another architecture, missing parts, names and settings of another version."""
    edit(copy, change)
    assert says in refusal(copy)


def test_half_a_checkpoint_is_passed_over_for_the_newest_whole_one(copy):
    """What a kill left behind does not count."""
    (copy / "checkpoints" / "120").mkdir()
    assert anakin.resume(copy, cores=2, total_steps=160, sinks=[]).steps == 160
    assert Checkpoints(copy / "checkpoints").steps() == [80, 160]


# Real signals to a real command


def start(directory):
    command = """train anakin --env catch --env.rows 5 --env.columns 3 --agent a2c --network.hidden 8 --cores 2
        --batch-per-core 4 --unroll-length 5 --updates-per-call 2 --evaluations 0 --total-steps 1000000000 --run"""
    return subprocess.Popen(
        [sys.executable, "-m", "launch.cli", *command.split(), str(directory)],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_the_command_leaves_a_checkpoint_and_resume_finishes_the_run(tmp_path, number, code):
    """Exit status 75 or 130, one line that says how to go on, no traceback; then it goes on."""
    directory, deadline = tmp_path / "run", time.monotonic() + 120
    process = start(directory)
    path = directory / "metrics.jsonl"
    while not (path.is_file() and path.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    steps = Checkpoints(directory / "checkpoints").steps()[-1]
    assert f"stopped at {steps:,} steps; go on with: podracer resume {directory}" in last
    assert rows_of(directory)[-1]["steps"] == steps
    command = [sys.executable, "-m", "launch.cli", "resume", str(directory), "--cores", "2"]
    done = subprocess.run(
        [*command, "--total-steps", str(steps + 160)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"{steps + 160:,} steps" in done.stdout
    assert [row["steps"] for row in rows_of(directory)] == list(range(80, steps + 161, 80))
