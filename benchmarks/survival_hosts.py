"""Parts b, c, f and h of `survival.py`: two hosts, started as users start them, by `podracer launch local`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import survival_signal
from etils import epath
from survival import Result

from podracer import manifest, shelf

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
DEADLINE_S = 15.0  # until all processes are gone, after one of them is: on a machine that has nothing else to do, 5
START_S = 300.0
TRAIN = """train anakin --env catch --env.rows 5 --env.columns 3 --agent a2c --network.hidden 8 --batch-per-core 2
    --unroll-length 5 --updates-per-call 20 --evaluations 0 --total-steps 100000000 --checkpoint-every-s 1"""


class Job:
    """Two hosts on this machine, running one command."""

    def __init__(self, command: list[str], folder: pathlib.Path, *options: str, **more: str):
        self.output = folder / "output"
        self._file = open(self.output, "wb")  # noqa: SIM115 (closed by `finish`)
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "xla")}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONPATH": f"{ROOT}:{HERE}"}
        environment |= more
        line = [sys.executable, "-m", "launch.cli", "launch", "local", "--hosts", "2", "--cores-per-host", "2"]
        self.process = subprocess.Popen(
            [*line, *options, "--", *command], cwd=ROOT, env=environment, stdout=self._file, stderr=subprocess.STDOUT
        )

    @property
    def hosts(self) -> list[int]:
        """The process ids of the hosts, the first first."""
        with contextlib.suppress(OSError):
            path = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            return [int(pid) for pid in path.read_text().split()]
        return []

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float) -> int | None:
        """The launcher's status; None: it goes on after so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def finish(self) -> None:
        """End whatever is left."""
        for pid in [*self.hosts, self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._file.close()


def _steps(run: pathlib.Path) -> list[int]:
    """The complete checkpoints of a run."""
    folder = run / "checkpoints"
    if not folder.exists():
        return []
    found = shelf.Shelf(epath.Path(folder), 2, None)
    return [shelf.parse(name)[0] for name in found.names() if manifest.exists(found.directory / name)]


def _await(job: Job, condition, seconds: float = START_S) -> bool:
    """Whether it came true while the job was there."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and job.process.poll() is None:
        if condition():
            return True
        time.sleep(0.02)
    return False


def _gone(pids: list[int], seconds: float) -> float | None:
    """Seconds until all these processes are gone; None: they are not."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
            return time.monotonic() - began
        time.sleep(0.01)
    return None


# b: one host dies


def lost_hosts(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """One run that is started again each time that one of its hosts was killed, or raised."""
    rng, run = random.Random(seed), folder / "run"
    result = Result(
        "b", f"one of two hosts killed or raising: all gone within {DEADLINE_S:.0f} s, the run goes on", 0, 0
    )
    command = TRAIN.replace("catch --env.rows 5 --env.columns 3", f"{HERE}/survival_faults.py:signalled")
    job = Job([*command.split(), "--run", str(run)], folder, "--max-restarts", str(times + 2))
    slowest, at = 0.0, -1
    # SIGABRT is what a failed assertion in a library comes to; SIGUSR1 raises a Python exception.
    numbers = (signal.SIGKILL, signal.SIGUSR1, signal.SIGABRT)
    try:
        while result.tried < times:
            if not _await(job, lambda at=at: len(job.hosts) == 2 and max(_steps(run), default=-1) > at):
                result.failures.append(f"does not go on: {job.said[-1500:]}")
                break
            time.sleep(rng.uniform(0, 3))
            pids, at = job.hosts, max(_steps(run))
            victim = rng.choice(pids)
            number = numbers[result.tried % len(numbers)]
            os.kill(victim, number)
            result.tried += 1
            took = _gone(pids, DEADLINE_S)
            after = max(_steps(run), default=-1)
            told = number != signal.SIGUSR1 or survival_signal.TEXT in job.said
            if took is None or after < at or not told:
                result.failures.append(
                    f"host {pids.index(victim)}, {number.name}: {took} s, {at} then {after}, said {told}"
                )
            else:
                slowest = max(slowest, took)
                result.good += 1
        else:
            if not _await(job, lambda at=at: max(_steps(run), default=-1) > at):
                result.failures.append("the last restart does not go on")
                result.good -= 1
    finally:
        job.finish()
    result.notes = f"all gone after {slowest:.1f} s at most"
    return [result]


# c: SIGTERM


def signals(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """A signal to the launcher: all hosts stop after one update, which is in the checkpoint; then on from there."""
    rng, run = random.Random(seed), folder / "run"
    result, at = Result("c", "SIGTERM: same update on both hosts, status 75, no update lost", 0, 0), 0
    slowest = 0.0
    for number in range(times):
        command = ["resume", str(run)] if number else [*TRAIN.split(), "--run", str(run)]
        job = Job(command, folder)
        try:
            if not _await(job, lambda at=at: _last_row(run) > at):
                result.failures.append(f"does not start: {job.said[-1500:]}")
                break
            time.sleep(rng.uniform(0, 2))
            began = time.monotonic()
            job.process.send_signal(signal.SIGTERM)
            status = job.wait(60)
            slowest = max(slowest, time.monotonic() - began)
            result.tried += 1
            steps = max(_steps(run), default=-1)
            good = status == 75 and steps == _last_row(run) >= at
            at = steps
            result.good += good
            if not good:
                result.failures.append(f"status {status}, {steps}, {_last_row(run)}: {job.said[-1500:]}")
        finally:
            job.finish()
    result.notes = f"stopped after {slowest:.1f} s at most"
    return [result]


def _last_row(run: pathlib.Path) -> int:
    """The steps of the last row that the first host wrote."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    with contextlib.suppress(ValueError, IndexError, KeyError):
        return json.loads(lines[-1])["steps"]
    return -1


# f: one host is missing


def missing_hosts(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """The other one waits for so long as it was told, and says whom for."""
    result = Result("f", "one of two hosts does not start: the other names it and ends by its deadline", 0, 0)
    for number in range(times):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        mine, other = number % 2, 1 - number % 2
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        environment |= {"PODRACER_COORDINATOR": address, "PODRACER_HOSTS": "2", "PODRACER_HOST": str(mine)}
        line = [sys.executable, "-m", "launch.cli", *TRAIN.split(), "--run", str(folder / f"run{number}")]
        line += ["--hosts-timeout", "10"]
        began = time.monotonic()
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        took, said = time.monotonic() - began, done.stdout + done.stderr
        result.tried += 1
        good = done.returncode not in (0, None) and "Traceback" not in said and str(other) in said and took < 90
        result.good += good
        result.notes += f"{took:.0f} s "
        if not good:
            result.failures.append(f"host {mine} alone: status {done.returncode} after {took:.0f} s: {said[-1500:]}")
    return [result]


# h: faults of threads

FAULTS = {"raise": "the fault of this benchmark", "exit": "", "hang": "no sign of life"}
PLACES = ("environment", "policy", "learner")


def faults(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """Environments, policies and learners that raise, end their process, or hang, on either host."""
    result = Result(
        "h",
        "Sebulba: environment, policy or learner raises, crashes or hangs on one of two hosts: all end, and say why",
        0,
        0,
    )
    cases = [(fault, place, host) for fault in FAULTS for place in PLACES for host in (0, 1)]
    for number in range(times):
        fault, place, host = cases[number % len(cases)]
        agent = f"{HERE}/survival_faults.py:faulty_impala"
        command = f"""train sebulba --env {HERE}/survival_faults.py:FaultyCatch --agent {agent}
            --actor-cores 1 --threads-per-core 1 --unroll-length 5 --no-probe
            --evaluations 0 --total-steps 10000000 --stall-timeout 20 --run {folder}/run{number}"""
        job = Job(command.split(), folder, FAULT=fault, FAULT_WHERE=place, FAULT_HOST=str(host))
        try:
            status = job.wait(180)
            said, left = job.said, job.hosts
        finally:
            job.finish()
        result.tried += 1
        # What a user's own file raises is the user's to mend, and ends with status 2.
        good = status not in (0, None) and FAULTS[fault] in said and not left
        result.good += good
        if not good:
            words = f"{fault} in the {place} on host {host}"
            result.failures.append(f"{words}: status {status}, left {left}: {said[-1500:]}")
    return [result]


PARTS = {"b": lost_hosts, "c": signals, "f": missing_hosts, "h": faults}
