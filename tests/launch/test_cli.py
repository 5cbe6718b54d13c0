"""The `podracer` command: help, one line for every mistake, and a run from start to picture."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import pytest

from launch import cli
from podracer import places
from podracer.checkpoint import Checkpoints
from tests.launch.hosts import free_port

TINY = ["--batch-per-core", "4", "--unroll-length", "5", "--cores", "2", "--preset", "none"]


def environment():
    """For subprocesses: the same compilation cache."""
    found = {**os.environ, "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    return {**found, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05", "PYTHONPATH": os.getcwd()}


def command(*arguments, **options):
    """A process of its own."""
    line = [sys.executable, "-m", "launch.cli", *map(str, arguments)]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=240, **options)


@pytest.fixture
def podracer(capsys, monkeypatch):
    """`podracer(*arguments)` in this process -> (exit status, stdout, stderr)."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # the command replaces it

    def run(*arguments):
        try:
            cli.main(list(map(str, arguments)))
            status = 0
        except SystemExit as exit_:
            status = exit_.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def mistake(podracer):
    """`mistake(*arguments)`: the one line on stderr of a command that exits with 2."""

    def run(*arguments):
        status, out, err = podracer(*arguments)
        assert (status, out) == (2, ""), (status, out, err)
        assert err.startswith("podracer: ") and err.endswith("\n")
        assert err.count("\n") == 1 and "Traceback" not in err, err
        assert len(err) < 900
        return err

    return run


@pytest.mark.skipif(places.has_tpu(), reason="there is a TPU")
def test_the_tpu_compiler_is_quiet_where_there_is_no_tpu():
    """Where it is installed for `podracer compile`, JAX tries it first, and it speaks of all it does not find."""
    users = {name: value for name, value in environment().items() if not name.startswith(("TPU_", "JAX_PLATFORMS"))}
    line = "launch.cli train anakin --env catch --agent a2c --env.colums 3"
    words = [sys.executable, "-m", *line.split()]
    done = subprocess.run(words, env=users, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("podracer: catch has no option 'colums'") and done.stderr.count("\n") == 1


# Help


def test_help_answers_without_importing_jax():
    """The first thing that anybody types."""
    script = "import sys; from launch import cli; cli.main(['--help']); assert not {'jax', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: podracer COMMAND") and done.stderr == ""
    assert all(f"  {name}" in done.stdout for name in cli.COMMANDS)
    assert len(done.stdout.splitlines()) < 25


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", [*cli.COMMANDS, "train anakin"])
def test_every_command_explains_itself(podracer, name, flag):
    """Usage first, no error, no line wider than a terminal of 120 columns; no run directory is needed for it."""
    status, out, err = podracer(*name.split(), flag)
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: podracer {name}")


def test_the_options_of_train_are_those_of_the_agent_and_network(podracer):
    """And those of Anakin, each with a sentence and its default."""
    _, out, _ = podracer("train", "anakin", "--agent", "pqn", "--network", "lstm", "--help")
    flags = ("--total-steps", "--sweep", "--agent.q-lambda", "--network.size", "--run", "--cores", "--platform")
    for flag in flags:
        assert flag in out
    assert "--agent.clip" not in out
    _, out, _ = podracer("train", "anakin", "--env", "cartpole", "--agent", "ppo", "--help")
    assert "(preset cartpole-ppo)" in " ".join(out.split())


def test_environments_and_agents_are_listed_one_per_line(podracer):
    """With what they are, and how to bring one's own."""
    for name, some in (
        ("envs", ["catch", "minatar/Breakout", "brax/ant"]),
        ("agents", ["a2c", "impala", "ppo", "pqn"]),
    ):
        status, out, _ = podracer(name)
        lines = out.splitlines()
        assert status == 0
        assert set(some) <= {line.split()[0] for line in lines}
        assert lines[-1].startswith("path.py:Object")
        assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_version(podracer):
    """A number."""
    assert podracer("--version")[1][0].isdigit()


# One line for every mistake


@pytest.mark.parametrize(
    "line, says",
    [
        ("trian", "unknown command 'trian'. Did you mean 'train'?"),
        ("train", None),
        ("train anakim", "unknown architecture 'anakim'. Did you mean 'anakin'?"),
        ("train anakin --env cach", "unknown environment 'cach'. Did you mean 'catch'?"),
        ("train anakin --env gymnax/CartPol-v1", "CartPol-v1"),
        ("train anakin --env=cach", "unknown environment 'cach'"),
        ("train anakin --agent ppp", "unknown agent 'ppp'. Did you mean 'ppo'?"),
        ("train anakin --network lstn", "unknown network 'lstn'. Did you mean 'lstm'?"),
        ("train anakin --preset catch-pp", "unknown preset 'catch-pp'. Did you mean 'catch-ppo'?"),
        ("train anakin --preset catch-ppo --agent a2c", "preset catch-ppo is for ppo on catch, not a2c on catch"),
        ("train anakin --total-step 5", "unknown flag --total-step. Did you mean '--total-steps'?"),
        (
            "train anakin --agent.learning-rat 5",
            "unknown flag --agent.learning-rat. Did you mean '--agent.learning-rate'?",
        ),
        ("train anakin --agent.learning-rat=5", "unknown flag --agent.learning-rat."),
        ("train anakin extra", "extra"),
        ("train anakin --env", "--env has no value"),
        ("train anakin --run", "--run"),
        ("train anakin --total-steps many", "--total-steps"),
        ("train anakin --total-steps 1.5", "--total-steps"),
        ("train anakin --total-steps -5", "total_steps is -5"),
        ("train anakin --agent.learning-rate fast", "--agent.learning-rate"),
        ("train anakin --agent.learning-rate -1", "learning_rate is -1; expected a finite number >= 0"),
        ("train anakin --agent.learning-rate nan", "learning_rate is nan"),
        ("train anakin --agent.discount 1.5", "discount is 1.5; expected a finite number >= 0 and <= 1"),
        ("train anakin --agent.clip inf", "clip is inf"),
        ("train anakin --network.activation sigmoit", "--network.activation"),
        ("train anakin --network.hidden 0", "hidden=(0,)"),
        ("train anakin --nan ignore", "--nan"),
        ("train anakin --tensorboard maybe", "--tensorboard"),
        ("train anakin --profile 3", "profile is '3'; expected START:STOP"),
        ("train anakin --profile 9000000:9000001", "but the run ends with update"),
        ("train sebulba --profile 4:3", "profile is '4:3'; expected START:STOP"),
        ("train anakin --metrics-port 0", "metrics_port is 0"),
        ("train sebulba --metrics-port http", "--metrics-port is 'http'; expected a number. See"),
        ("train anakin --agent.minibatches 7 --preset none", "minibatches = 7"),
        ("train anakin --starts optimistic --batch-per-core 5 --preset none", "optimistic_ratio"),
        ("train anakin --sweep learning_rat=1", "sweep has 'learning_rat'"),
        ("train anakin --cores many", "--cores is 'many'; expected auto or a number"),
        ("train anakin --cores 0", "--cores is 0"),
        ("train anakin --cores -2", "--cores is '-2'"),
        ("train anakin --cores 1.5", "--cores is '1.5'"),
        ("train anakin --cores 64", "cores is 64"),
        ("train anakin --platform gpux", "--platform"),
        ("train anakin --env.rows", "--env.rows has no value"),
        ("train anakin --env.row 8", "catch has no option 'row'. Did you mean 'rows'?"),
        ("train anakin --env.rows 8.5", "catch does not work with rows = 8.5: TypeError"),
        ("train anakin --env.rows many", "catch does not work with rows = 'many': TypeError"),
        ("train anakin --agent pqn --env gymnax/Pendulum-v1", "pqn"),
        ("train anakin --env nothing.py:Env", "there is no file nothing.py"),
        ("train anakin --env nothing.py", "expected path.py:Object"),
        ("train anakin --wandb True", "wandb is not installed"),
        ("eval", "eval needs a run directory"),
        ("eval --episodes 3", "eval needs a run directory"),
        ("eval nowhere", "nowhere is not a run directory"),
        ("resume nowhere", "nowhere is not a run directory"),
        ("render nowhere", "nowhere is not a run directory"),
        ("plot", "plot needs run directories"),
        ("plot nowhere", "nowhere is not a run directory"),
        ("envs extra", "envs takes no options; got 'extra'"),
        ("agents --all", "agents takes no options"),
        ("demo --out", "--out"),
        ("demo --cores x", "--cores is 'x'"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(podracer, mistake, tmp_path, monkeypatch, line, says):
    """Exit status 2, nothing on stdout, no traceback, and no run directory left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    if says is None:
        assert podracer(*line.split())[0] == 0
        return
    assert says in mistake(*line.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_platform_that_is_not_there_is_refused_and_never_replaced_by_the_cpu(tmp_path, platform):
    """In a process of its own, where JAX has not started yet."""
    done = command("train", "anakin", "--platform", platform, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and f"platform '{platform}'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_run_directories_that_cannot_be_made_are_refused(mistake, tmp_path):
    """One that exists, one below a file."""
    assert "exists. Choose another --run" in mistake("train", "anakin", "--run", tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot be made: Not a directory" in mistake("train", "anakin", *TINY, "--run", tmp_path / "file" / "run")


# Files of the user's own

MINE = """
import jax
import jax.numpy as jnp
from podracer import agents, envs, networks
from podracer.types import Agent

class Broken(envs.Catch):
    def reset(self, key):
        state, observation = super().reset(key)
        return state, observation + undefined_name  # reset

class Mistaken(envs.Catch):
    def reset(self, key):
        raise ValueError("not now")  # value error

class Sized(envs.Catch):
    pass

class Stepless(envs.Catch):
    def step(self, state, action, key):
        return helper(state)  # step

def helper(state):
    raise RuntimeError("two\\nlines")  # helper

class Unmade:
    def __init__(self):
        raise ValueError("not today")  # constructor

class Nothing:
    pass

def agent(spec):
    raise KeyError("no such thing")  # agent

def half(spec):
    return Agent(1, 2)  # half

def three(spec):
    return 3

def learner(spec):
    made = agents.a2c(spec)
    def learner_step(state, trajectory, key, axis_name):
        return state.params.nothing  # learner
    return Agent(made.initial_learner_state, made.initial_actor_state, made.actor_step, learner_step)

def network(spec, rngs):
    return networks.mlp((8,))(spec.missing, rngs)  # network

number = 3
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def line_of(text):
    return next(number for number, line in enumerate(MINE.splitlines(), 1) if line.endswith(f"# {text}"))


@pytest.mark.parametrize(
    "flag, name, where, says",
    [
        ("env", "Broken", "reset", "NameError: name 'undefined_name' is not defined"),
        ("env", "Mistaken", "value error", "ValueError: not now"),
        ("env", "Stepless", "helper", "RuntimeError: two lines"),
        ("env", "Unmade", "constructor", "ValueError: not today"),
        ("agent", "agent", "agent", "KeyError: 'no such thing'"),
        ("agent", "half", "half", "TypeError"),
        ("agent", "learner", "learner", "AttributeError"),
        ("network", "network", "network", "AttributeError"),
    ],
)
def test_exceptions_in_a_users_file_name_its_line(mistake, mine, tmp_path, flag, name, where, says):
    """At construction and while the program is traced, before a run directory is made."""
    run = tmp_path / "run"
    text = mistake("train", "anakin", f"--{flag}", f"{mine}:{name}", *TINY, "--run", run)
    assert f"{mine}:{line_of(where)}: {says}" in text
    assert not run.exists()


@pytest.mark.parametrize(
    "flag, name, says",
    [
        ("env", "Nothing", "without spec and reset and step"),
        ("env", "number", "without spec and reset and step"),
        ("env", "Brokn", "Did you mean 'Broken'?"),
        ("agent", "three", "made a int; expected an Agent"),
        ("agent", "number", "is a int; expected a function"),
        ("network", "number", "is a int; expected a function"),
    ],
)
def test_objects_of_the_wrong_kind_are_told_what_they_lack(mistake, mine, tmp_path, flag, name, says):
    """Members, types and names."""
    assert says in mistake("train", "anakin", f"--{flag}", f"{mine}:{name}", *TINY, "--run", tmp_path / "run")


@pytest.mark.parametrize(
    "option, value, says",
    [
        ("size", 3, "mine.py:Sized has no option 'size'. It has: rows, columns."),
        ("rows", "many", "mine.py:Sized does not work with rows = 'many': TypeError"),
    ],
)
def test_wrong_options_of_a_users_environment_are_named(mistake, mine, tmp_path, option, value, says):
    """The names are known from its signature; a value shows itself when the program is traced."""
    arguments = ["--env", f"{mine}:Sized", f"--env.{option}", value]
    assert says in mistake("train", "anakin", *arguments, *TINY, "--run", tmp_path / "run")


@pytest.mark.parametrize(
    "text, says", [("import nothing_of_the_kind", "ModuleNotFoundError"), ("def f(:", "SyntaxError")]
)
@pytest.mark.parametrize("flag", ["env", "agent", "network"])
def test_files_that_cannot_be_imported_name_the_line(mistake, tmp_path, flag, text, says):
    """The third line of it."""
    path = tmp_path / "mine.py"
    path.write_text(f"\n\n{text}\n")
    found = mistake("train", "anakin", f"--{flag}", f"{path}:thing", "--run", tmp_path / "run")
    assert f"{path}:3: {says}" in found


# A run from start to picture


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs of one program and one run alone, trained by the command."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = ["--env=catch", "--env.rows", 5, "--agent", "a2c", "--network.hidden", 8, *TINY, "--eval-episodes", 8]
    arguments += ["--evaluations", 2, "--total-steps", 160]
    done = command("train", "anakin", *arguments, "--run", folder / "one")
    many = command("train", "anakin", *arguments, "--sweep", "learning_rate=1e-2", "--run", folder / "many")
    assert (done.returncode, many.returncode) == (0, 0), done.stderr + many.stderr
    return folder, done


@pytest.mark.slow
def test_training_tells_what_it_does_and_what_to_do_next(finished):
    """Sizes, compilation, progress on stderr; the result on stdout; nothing else, no warning."""
    folder, done = finished
    out, err = done.stdout.splitlines(), done.stderr.splitlines()
    assert out[0].startswith(f"{folder / 'one'}: 160 steps; best evaluation ")
    assert out[1] == "next:"
    assert [line.split()[:3] for line in out[2:]] == [
        ["podracer", name, str(folder / "one")] for name in ("eval", "render", "plot")
    ]
    assert err[0].startswith("2 cpu cores x 4 environments, unroll 5, 1 update per call (40 steps)")
    assert any(line.startswith("compiled in") for line in err)
    assert err[-1].startswith("a2c on catch  100%  160 steps")
    assert "arning" not in done.stderr


@pytest.mark.slow
def test_a_finished_run_is_measured_drawn_plotted_and_extended(finished, podracer, mistake, tmp_path):
    """eval, render, plot and resume, and what each refuses."""
    directory = shutil.copytree(finished[0] / "one", tmp_path / "one")
    status, out, _ = podracer("eval", directory, "--episodes", 16, "--json", "True")
    found = json.loads(out)
    best = Checkpoints(directory / "best", 1)
    assert (status, found["episodes"], found["unfinished"]) == (0, 16, 0)
    assert found["length_mean"] == 4 and found["steps"] == best.meta()["steps"]
    best.close()
    again = json.loads(podracer("eval", directory, "--episodes", 16, "--json", "True")[1])
    assert again == found
    assert "return" in podracer("eval", directory, "--episodes", 4, "--params", "last", "--greedy", "False")[1]
    assert "3 cut at the step cap" not in podracer("eval", directory, "--episodes", 3, "--max-steps", 4)[1]
    assert "3 cut at the step cap" in podracer("eval", directory, "--episodes", 3, "--max-steps", 3)[1]
    for bad, says in (
        (["--episodes", 0], "--episodes is 0"),
        (["--seed", -1], "--seed is -1"),
        (["--member", 1], "holds one run"),
        (["--params", "worst"], "--params"),
    ):
        assert says in mistake("eval", directory, *bad)

    assert podracer("render", directory, "--episodes", 1)[1] == f"{directory / 'play.gif'}: 4 frames\n"
    assert "--out is" in mistake("render", directory, "--out", "x.avi")
    assert "--frames-per-s is 0" in mistake("render", directory, "--frames-per-s", 0)
    assert "a2c does not plan" in mistake("render", directory, "--tree")

    out = tmp_path / "x.png"
    assert podracer("plot", directory, "--out", out)[1] == f"{out}: a2c on catch (1 run)\n"
    assert "Did you mean 'return_mean'" in mistake("plot", directory, "--metric", "retrun_mean")
    assert "--x" in mistake("plot", directory, "--x", "time")

    assert "is finished" in mistake("resume", directory)
    assert "--total-steps is 0" in mistake("resume", directory, "--total-steps", 0)
    assert "metrics_port is 0" in mistake("resume", directory, "--metrics-port", 0)
    assert "profile is '3'" in mistake("resume", directory, "--profile", 3)
    status, out, _ = podracer("resume", directory, "--total-steps", 200, "--cores", 2)
    assert (status, out.splitlines()[0].split(";")[0]) == (0, f"{directory}: 200 steps")


@pytest.mark.slow
def test_one_run_in_a_program_of_many_is_still_many(finished, podracer, mistake):
    """A sweep over a single value has members, too."""
    directory = finished[0] / "many"
    status, out, _ = podracer("eval", directory, "--episodes", 4)
    assert status == 0 and "a2c on catch, member 0 (learning_rate=0.01, seed 0)" in out
    assert isinstance(json.loads(podracer("eval", directory, "--json", "True", "--member", 0)[1])["return_mean"], float)
    assert "--member is 1; expected 0 to 0" in mistake("eval", directory, "--member", 1)
    assert "--member is -1" in mistake("render", directory, "--member", -1)


@pytest.mark.slow
def test_damaged_run_directories_are_one_line(finished, mistake, tmp_path):
    """Config, metrics and checkpoints, overwritten or missing."""
    directory = shutil.copytree(finished[0] / "one", tmp_path / "one")
    (directory / "metrics.jsonl").write_text("garbage\n{}\n")
    assert "metrics.jsonl:1 is not a JSON object" in mistake("plot", directory)
    for data in (directory / "best").glob("*/params/d/*"):
        data.write_bytes(b"garbage")
    assert "cannot be read" in mistake("eval", directory)
    shutil.rmtree(directory / "best")
    shutil.rmtree(directory / "checkpoints")
    for name in ("eval", "render", "resume"):
        assert "no complete checkpoint" in mistake(name, directory)
    for text, says in (
        ("{", "not readable JSON"),
        ("{}", "lacks the settings"),
        ('{"settings": {}, "recipe": null}', "run"),
    ):
        (directory / "config.json").write_text(text)
        for name in ("eval", "resume"):
            assert says in mistake(name, directory)


@pytest.mark.parametrize(("interrupt", "says"), [((), "interrupted"), (("stopped at 3 steps",), "stopped at 3 steps")])
def test_ctrl_c_is_one_line_and_exit_status_130(podracer, monkeypatch, interrupt, says):
    def stops():
        raise KeyboardInterrupt(*interrupt)

    monkeypatch.setattr(cli, "_dispatch", lambda arguments: stops())
    assert podracer("agents") == (130, "", f"podracer: {says}\n")


def test_a_reader_that_is_gone_is_no_failure():
    """`podracer envs | head -1`: no traceback, no message, whatever the buffers hold."""
    script = f"{sys.executable} -m launch.cli envs | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0].startswith("catch") and done.stdout.splitlines()[1] == "0"
    assert done.stderr == ""


def test_a_host_whose_others_do_not_come_is_started_again(podracer):
    """No mistake of the user's, as far as it knows: 71, after which launchers start all again."""
    line = f"train anakin --env catch --agent ppo --coordinator 127.0.0.1:{free_port()} --hosts 3 --hosts-timeout 1"
    for host, missing in ((0, "hosts 1, 2"), (2, "host 0")):
        status, out, err = podracer(*line.split(), "--host", host)
        assert (status, out, err.count("\n")) == (71, "", 1)
        assert err.startswith(f"podracer: {missing} did not come to 127.0.0.1:")


@pytest.mark.slow
def test_a_failed_run_is_one_line_and_exit_status_one(podracer, tmp_path):
    """A loss that is not finite: what happened, where the checkpoints are, what to do."""
    path = tmp_path / "mine.py"
    path.write_text(
        textwrap.dedent(
            """
            import jax.numpy as jnp
            from podracer import envs
            class Sick(envs.Catch):
                def step(self, state, action, key):
                    state, out = super().step(state, action, key)
                    return state, out._replace(reward=out.reward * jnp.nan)
            """
        )
    )
    run = tmp_path / "run"
    status, _, err = podracer("train", "anakin", "--env", f"{path}:Sick", *TINY, "--total-steps", 40, "--run", run)
    assert status == 72 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("podracer: the loss of update 1 is not finite; training stopped.")


SEBULBA = ["--batch-size", "4", "--unroll-length", "5", "--cores", "2", "--no-probe", "--eval-episodes", "2"]


def test_sebulba_from_train_to_picture(podracer, tmp_path):
    run = tmp_path / "run"
    options = [*SEBULBA, "--total-steps", "200", "--evaluations", "1", "--network.hidden", "8", "--run", run]
    status, out, err = podracer("train", "sebulba", "--env", "envpool/CartPole-v1", "--agent", "a2c", *options)
    assert status == 0 and f"{run}: 200 steps; best evaluation" in out, (out, err)
    assert "acting on" in err and "learning on" in err and "the ceiling" not in err
    status, out, err = podracer("resume", run, "--total-steps", "400", "--batch-size", "8", "--cores", "3")
    assert status == 0 and f"{run}: 440 steps" in out, (out, err)
    status, out, err = podracer("eval", run, "--episodes", "3", "--json")
    assert status == 0 and json.loads(out)["episodes"] == 3
    status, out, err = podracer("plot", run, "--out", tmp_path / "curve.png", "--metric", "steps_per_s")
    assert status == 0 and (tmp_path / "curve.png").exists(), err


PLANNER = (
    "--network.kind mlp --network.width 8 --network.head-width 8 --agent.num-simulations 4 --agent.batch-size 8 "
    "--agent.min-replay 20 --agent.sequence-length 10 --agent.replay-steps 400 --agent.td-steps 2"
)


def test_a_planner_from_train_to_the_picture_of_its_tree(podracer, mistake, tmp_path):
    run = tmp_path / "run"
    options = "--total-steps 200 --batch-per-core 4 --unroll-length 10 --cores 1 --evaluations 1 --eval-episodes 4"
    arguments = ["--env", "catch", "--agent", "gumbel-muzero", "--preset", "none", *options.split(), *PLANNER.split()]
    status, out, err = podracer("train", "anakin", *arguments, "--run", run)
    assert status == 0 and f"{run}: 200 steps" in out and "replay of 400 decisions" in err, (out, err)
    status, out, err = podracer("resume", run, "--total-steps", "280", "--cores", "1")
    assert status == 0 and f"{run}: 280 steps" in out, (out, err)
    status, out, err = podracer("render", run, "--tree", "--decision", "3")
    assert status == 0 and out.startswith(f"{run / 'tree.png'}: decision 3, action "), (out, err)
    assert (run / "tree.png").stat().st_size > 5_000
    assert "--out is 'x.gif'" in mistake("render", run, "--tree", "--out", "x.gif")
    assert "--decision is -1" in mistake("render", run, "--tree", "--decision", "-1")
    assert "expected Discrete. Choose ppo" in mistake(
        "train", "anakin", "--env", "gymnax/Pendulum-v1", "--agent", "muzero", "--run", tmp_path / "other"
    )


def test_atari_chooses_a_network_for_pictures(podracer):
    status, out, _ = podracer("train", "sebulba", "--env", "atari/Pong", "--agent", "pqn", "--help")
    assert status == 0 and "--network.widths" in out and "--network.hidden" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["anakin", "--env", "atari/Pong"],
            "atari/Pong runs on the host; use: podracer train sebulba --env atari/Pong",
        ),
        (["sebulba", "--env", "atari/Pon"], "Did you mean 'atari/Pong'?"),
        (["sebulba", "--env", "envpool/CartPole-v1", "--cores", "2", "--actor-cores", "2"], "actor_cores is 2 of 2"),
        (
            ["sebulba", "--env", "catch", "--batch-size", "7", "--cores", "4", "--actor-cores", "1"],
            "batch_size = 7 does not divide",
        ),
        (["sebulba", "--env", "catch", "--lag", "old"], "lag is 'old'; expected sync, fixed"),
        (["sebulba", "--env", "catch", "--batch-per-core", "4"], "unknown flag --batch-per-core"),
        (["sebulbo", "--env", "catch"], "Did you mean 'sebulba'?"),
    ],
)
def test_mistakes_with_sebulba_are_one_line(mistake, arguments, message, tmp_path):
    line = mistake("train", *arguments, *([] if "--help" in arguments else ["--run", tmp_path / "run"]))
    assert message in line and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_comes_in_a_destructor_is_not_lost(number, raised):
    """Python drops the exception of the handler there."""
    came = []

    class Dying:
        def __del__(self):
            came.append(signal.raise_signal(number))

    with pytest.raises(raised), cli._ends_by_sigterm():
        thing = Dying()
        del thing
        assert came == []  # the exception left the destructor before it was noted
        for _ in range(1000):
            time.sleep(0.01)


def test_other_exceptions_that_python_drops_are_said_as_always(monkeypatch):
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)

    class Dying:
        def __del__(self):
            raise ValueError("not a signal")

    with cli._ends_by_sigterm():
        Dying()
    assert [each.exc_type for each in dropped] == [ValueError]


def test_a_signal_while_flags_are_read_is_no_mistake_in_them(monkeypatch):
    """What ends a command with 75 is started again; a mistake is not."""

    def interrupted(*_, **__):
        raise SystemExit(75)

    monkeypatch.setattr("tyro.cli", interrupted)
    with pytest.raises(SystemExit) as ending:
        cli.main(["train", "anakin", "--env", "catch"])
    assert ending.value.code == 75
