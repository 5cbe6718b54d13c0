"""Several hosts for real: processes on 127.0.0.1 that train together, fail together and go on together."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import numpy as np
import pytest

import anakin
from launch import cli
from podracer.checkpoint import Checkpoints
from tests.anakin import tiny
from tests.launch.hosts import (
    ANAKIN,
    FOR_EVER,
    LOOPBACK,
    SEBULBA,
    children,
    end,
    free_port,
    launch,
    listeners,
    rows,
    running,
    start,
    start_each,
    wait_for_rows,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
SGD = ["--agent.optimizer", "sgd", "--agent.learning-rate", "0.1", "--total-steps", "800", "--evaluations", "2"]

# What JAX and Orbax have the cores add up for hosts to agree. Such a sum has no order among those of a program that
# runs on some cores of a host only: Gloo then takes the numbers of one for the other's, and ends the process.
NO_SUMS_BESIDE_THE_PROGRAM = """
from jax.experimental import multihost_utils
def refused(*_, **__):
    raise AssertionError("the hosts add something up beside the program")
multihost_utils.broadcast_one_to_all = multihost_utils.sync_global_devices = refused
multihost_utils.process_allgather = multihost_utils.assert_equal = refused
"""


def trained(directory):
    """The run's last checkpoint on the cores of this process."""
    return anakin.resume(directory, cores=4, total_steps=960, sinks=[])


def train_both_ways(tmp_path, line, rel=1e-4, abs=1e-5):
    """On two hosts of two cores and on one of four: the numbers in between are the same."""
    process = launch("--", *line, "--run", tmp_path / "two")
    with running(process):
        status, out, err = end(process)
    assert status == 0, err
    cli.main([*line, "--cores", "4", "--run", str(tmp_path / "one")])
    ours, theirs = (
        [{k: v for k, v in row.items() if "per_s" not in k and k != "train_s"} for row in rows(tmp_path / name)]
        for name in ("two", "one")
    )
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for one, other in zip(ours, theirs):
        for name in one if "updates" in one else ():
            assert one[name] == pytest.approx(other[name], rel=rel, abs=abs), name
    return out, err


def check_same_states(tmp_path):
    one, other = trained(tmp_path / "one"), trained(tmp_path / "two")
    for mine, yours in zip(tiny.leaves(one.state), tiny.leaves(other.state), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float64), np.asarray(yours, np.float64), atol=1e-5)


def test_two_hosts_of_two_cores_learn_what_one_of_four_does(tmp_path):
    """Under plain SGD; the numbers in between too; written by the first host alone, and readable by a single one."""
    out, err = train_both_ways(tmp_path, [*ANAKIN, *SGD])
    assert f"{tmp_path}/two: 800 steps" in out and "4 cpu cores x 4 environments" in err
    assert err.count("compiled in") == 1  # one host speaks
    assert [row["eval_episodes"] for row in rows(tmp_path / "two") if "eval_episodes" in row] == [8, 8]
    check_same_states(tmp_path)


def test_a_planner_learns_on_two_hosts_what_it_does_on_one(tmp_path):
    """With a memory on each core, which is written by its host and read by a single one."""
    planner = [
        *("--agent", "gumbel-muzero", "--agent.num-simulations", "2", "--agent.batch-size", "8"),
        *("--agent.sequence-length", "5", "--agent.unroll-steps", "2", "--agent.replay-steps", "40"),
        *("--agent.min-replay", "80", "--agent.value-bins", "5", "--agent.reward-bins", "5"),
        *("--network", "muzero", "--network.kind", "mlp", "--network.width", "8", "--network.head-width", "8"),
    ]
    line = [*without(ANAKIN, "--agent", "--network.hidden"), *planner, *SGD]
    train_both_ways(tmp_path, line, 1e-3, 1e-3)  # rounding grows with every unrolled step of the gradient
    assert [row for row in rows(tmp_path / "two") if row.get("gradient_steps")]
    assert trained(tmp_path / "two").steps == 960


def without(line, *flags):
    """The command without these flags and their values."""
    return [word for place, word in enumerate(line) if not {word, line[place - 1]} & set(flags)]


def test_a_signal_to_one_host_stops_all_at_the_same_update_and_one_host_goes_on(tmp_path):
    """SIGTERM to the second; status 75 of both; nothing listened on but the loopback interface."""
    directory = tmp_path / "run"
    first, second = start_each(*[[*ANAKIN, *FOR_EVER, "--run", directory]] * 2)
    with running(first, second):
        wait_for_rows(directory, 3, first, second)
        found = listeners(first.pid) | listeners(second.pid)
        assert found and found <= LOOPBACK
        sent = time.monotonic()
        second.send_signal(signal.SIGTERM)
        ends = [end(first), end(second)]
    assert time.monotonic() - sent < 20
    assert [status for status, _, _ in ends] == [75, 75], ends
    stops = [re.findall(r"stopped at ([\d,]+) steps; go on with: podracer resume", err) for _, _, err in ends]
    assert stops[0] == stops[1] and len(stops[0]) == 1
    steps = int(stops[0][0].replace(",", ""))
    assert Checkpoints(directory / "checkpoints").steps()[-1] == steps == rows(directory)[-1]["steps"]
    run = anakin.resume(directory, cores=2, total_steps=steps + 160, sinks=[])
    assert (run.steps, run.loop.num_cores, run.loop.batch_per_core) == (steps + 160, 2, 8)


def test_hosts_need_share_no_more_than_the_place_of_the_checkpoints(tmp_path):
    """Each with a run directory on its own disk; they go on from there, too."""
    for steps in (320, 640):
        line = [*ANAKIN, "--total-steps", steps, "--evaluations", "1", "--or-resume"]
        line += ["--checkpoint-dir", tmp_path / "shared"]
        processes = start_each(*([*line, "--run", tmp_path / f"{host}" / "run"] for host in (0, 1)))
        with running(*processes):
            ends = [end(process) for process in processes]
        assert [status for status, _, _ in ends] == [0, 0], ends
    assert [row["steps"] for row in rows(tmp_path / "0" / "run") if "updates" in row] == [160, 320, 480, 640]
    assert not (tmp_path / "1").exists()
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["best", "checkpoints"]
    assert anakin.resume(tmp_path / "0" / "run", cores=4, total_steps=800, sinks=[]).steps == 800


def test_a_run_directory_that_one_host_does_not_see_is_refused(tmp_path):
    """On both, before anything is compiled, and nothing of the question is left there."""
    line = [*ANAKIN, "--total-steps", "320"]
    processes = start_each(*([*line, "--run", tmp_path / f"{host}" / "run"] for host in (0, 1)))
    with running(*processes):
        ends = [end(process) for process in processes]
    assert [status for status, _, _ in ends] == [2, 2], ends
    assert "of host 0 is not there on host 1; expected one that all hosts share. Choose a --run" in ends[0][2]
    assert [path.name for path in (tmp_path / "0" / "run").iterdir()] == ["config.json"]


def test_hosts_that_were_started_differently_name_the_field(tmp_path):
    """Before anything is compiled or written; all of them, with status 2."""
    line = [*ANAKIN, "--run", tmp_path / "run"]
    first, second = start_each(line, [*line, "--agent.discount", "0.5"])
    with running(first, second):
        ends = [end(first), end(second)]
    for status, out, err in ends:
        assert (status, out) == (2, ""), err
        lines = [line for line in err.splitlines() if line.startswith("podracer: ")]
        assert len(lines) == 1 and "compiled" not in err and "Traceback" not in err
        assert "recipe.agent_config.discount is 0.99 on host 0 and 0.5 on host 1" in lines[0]
    assert not (tmp_path / "run").exists()


BY_HAND = """
import sys
from podracer import agents, envs, hosts, mesh
import anakin
hosts.connect(sys.argv[1], 2, int(sys.argv[2]))
env = envs.Catch(rows=5, columns=3)
loop = anakin.Anakin(agents.a2c(env.spec), env, 4, 5)
state = loop.init()
for number in range(10**9):
    state, metrics = loop.step(state)
    if number == 20 and hosts.index() == 1:
        print("raised", flush=True)
        raise ValueError("the second host fails here")
"""


def test_an_exception_on_one_host_ends_all_within_seconds():
    """JAX alone would wait five minutes."""
    address, cpu = f"127.0.0.1:{free_port()}", {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    first, second = (start(["-c", BY_HAND, address, host], **cpu) for host in (0, 1))
    with running(first, second):
        assert "raised\n" in iter(second.stdout.readline, "")
        raised = time.monotonic()
        ends = [end(first, 30), end(second, 30)]  # about a second; more where the machine is busy
    assert time.monotonic() - raised < 30
    assert [status for status, _, _ in ends] == [71, 70]
    assert ends[1][2].strip().splitlines()[-1] == "ValueError: the second host fails here"


SLOW_TO_END = """
import os, sys, time
from podracer import hosts
hosts.connect(sys.argv[1], 3, int(sys.argv[2]))
hosts.from_first("start", None)
if hosts.index() > 0:
    ends = os._exit
    os._exit = lambda status: (time.sleep(1.5), ends(status))
hosts.leave(2, "they disagree")
"""


def test_the_first_host_stays_until_the_others_have_ended():
    """Those that need a moment between their last word and their end still end with their own status."""
    address = f"127.0.0.1:{free_port()}"
    processes = [start(["-c", SLOW_TO_END, address, host], JAX_PLATFORMS="cpu") for host in range(3)]
    with running(*processes):
        ends = [end(process, 60) for process in processes]
    assert [status for status, _, _ in ends] == [2, 2, 2], ends


@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_stands_still_is_noticed_by_the_others(index, tmp_path):
    """It lives, and answers to no one: the other calls it a stall, with its stacks, and the launcher ends them all.

    The first host carries the messages: where it stands still, nobody can be told.
    """
    process = launch("--", *ANAKIN, *FOR_EVER, "--stall-timeout", "3", "--run", tmp_path / "run")
    with running(process):
        wait_for_rows(tmp_path / "run", 3, process)
        pids = children(process.pid)
        os.kill(pids[index], signal.SIGSTOP)
        status, _, err = end(process, 100)
    assert status == 73, err
    assert "no call has finished for 3 s (--stall-timeout)" in err and "most recent call first" in err
    assert not any(map(alive, pids))


def test_a_killed_host_ends_the_others_and_the_launcher_goes_on(tmp_path):
    """kill -9 of the second; the rows in the end are those of an undisturbed run; no process is left."""
    directory, started = tmp_path / "run", time.monotonic()
    sizes = ["--total-steps", 160 * 300, "--evaluations", 3]
    process = launch("--max-restarts", 1, "--", *ANAKIN, *sizes, "--run", directory)
    with running(process):
        wait_for_rows(directory, 130, process)  # after a checkpoint, before the next
        before = children(process.pid)
        os.kill(before[1], signal.SIGKILL)
        while set(before) & set(children(process.pid)):
            assert time.monotonic() < started + 120
            time.sleep(0.05)
        status, _, err = end(process)
    assert status == 0, err
    assert "host 1 was ended by SIGKILL" in err and "restart 1 of 1 (the status was 137)" in err
    steps = [row["steps"] for row in rows(directory) if "updates" in row]
    assert steps == list(range(160, 160 * 300 + 1, 160))
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before)


def test_a_host_whose_peer_is_killed_ends_by_itself_and_names_it(tmp_path):
    """Without a launcher, as on a pod: the kernel closes the connections of the one, the other is there for seconds."""
    first, second = start_each(*[[*ANAKIN, *FOR_EVER, "--run", tmp_path / "run"]] * 2)
    with running(first, second):
        wait_for_rows(tmp_path / "run", 3, first, second)
        second.kill()
        status, _, err = end(first, 30)  # about 2 s; more where the machine is busy
    assert status == 71, err
    assert "podracer: host 1 has ended without a word (killed, or out of memory?); this one stops" in err
    assert "Traceback" not in err


def test_sebulba_trains_over_two_hosts_and_one_goes_on(tmp_path):
    """Each host with its own actors: twice the steps per update, and the games of both in the metrics."""
    directory = tmp_path / "run"
    sizes = ["--total-steps", "400", "--evaluations", "2"]
    (tmp_path / "sitecustomize.py").write_text(NO_SUMS_BESIDE_THE_PROGRAM)
    process = launch("--", *SEBULBA, *sizes, "--run", directory, path=tmp_path)
    with running(process):
        status, _, err = end(process)
    assert status == 0, err
    assert "20 frames per update and host, 2 hosts (40 steps per update" in err
    found = [row for row in rows(directory) if "updates" in row]
    assert [row["steps"] for row in found] == list(range(40, 401, 40))
    assert {row["num_cores"] for row in found} == {4}
    assert json.loads((directory / "config.json").read_text())["num_cores"] == 4  # of all hosts
    assert [row["episodes"] for row in found] == [8 * (5 * n // 4) for n in range(1, 11)]  # an episode is 4 steps
    assert [row["eval_episodes"] for row in rows(directory) if "eval_episodes" in row] == [4, 4]
    cli.main(["resume", str(directory), "--cores", "2", "--total-steps", "440"])
    last = [row for row in rows(directory) if "updates" in row][-1]
    assert (last["steps"], last["num_cores"]) == (440, 2)


def test_a_single_host_that_is_told_to_end_while_it_compiles_can_be_started_again(tmp_path):
    """The same command, again and again: nothing is there yet, then a checkpoint, then the end."""
    line = ["-m", "launch.cli", *ANAKIN, "--cores", "2", "--or-resume", "--run", tmp_path / "run"]
    line += ["--total-steps", 80 * 20, "--evaluations", 2]
    process = start(line)
    with running(process):
        while not (tmp_path / "run").exists():
            assert process.poll() is None, end(process)
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        status, _, err = end(process)
    assert status == 75 and "Traceback" not in err, err
    for says in ("1,600 steps; best evaluation", "is finished: it has 1,600 of 1,600 steps"):
        process = start(line)
        with running(process):
            status, out, err = end(process)
        assert status == 0 and says in out, err
    process = start([*line, "--agent.discount", "0.5"])
    with running(process):
        status, _, err = end(process)
    assert status == 2 and "recipe.agent_config.discount is 0.99 there and 0.5 now" in err


def test_each_host_keeps_what_it_has_compiled(tmp_path):
    """JAX lets the first host alone keep programs, and on a CPU the others do not find them: their devices differ."""
    cache = tmp_path / "cache"
    line = ["-m", "launch.cli", "launch", "local", "--cores-per-host", 1, "--", *ANAKIN]
    line += ["--total-steps", 160, "--evaluations", 0]
    found = []
    for name in ("one", "two"):
        process = start([*line, "--run", tmp_path / name], JAX_COMPILATION_CACHE_DIR=str(cache))
        with running(process):
            status, _, err = end(process)
        assert status == 0, err
        found.append({path.name for path in cache.glob("jit__call-*-cache")})
    assert len(found[0]) == 2 and found[1] == found[0]  # of each host its own, and nothing new the second time


def test_ctrl_c_reaches_all_hosts_and_a_killed_launcher_takes_them_along(tmp_path):
    """130, after a checkpoint; after kill -9 of the launcher nothing is left either."""
    process = launch("--max-restarts", 5, "--", *ANAKIN, *FOR_EVER, "--run", tmp_path / "run")
    with running(process):
        wait_for_rows(tmp_path / "run", 3, process)
        process.send_signal(signal.SIGINT)
        status, _, err = end(process, 60)
    assert status == 130 and "Traceback" not in err and "restart" not in err, err
    assert f"go on with: podracer resume {tmp_path}/run" in err
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()
    process = launch("--", "resume", tmp_path / "run")
    with running(process):
        wait_for_rows(tmp_path / "run", len(rows(tmp_path / "run")) + 1, process)
        pids = children(process.pid)
        policies = {os.sched_getscheduler(int(one)) for pid in pids for one in os.listdir(f"/proc/{pid}/task")}
        process.kill()
        deadline = time.monotonic() + 10
        while any(map(alive, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert len(pids) == 2
    assert policies == {os.SCHED_BATCH}  # no thread of theirs interrupts another one


def alive(pid: int) -> bool:
    """Whether the process is there, and not just waits for its parent to ask how it ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
