"""Parts b, c, f and h of `survival.py`: two hosts, each started by itself."""

from __future__ import annotations

import contextlib
import json
import pathlib
import random
import re
import shutil
import signal
import time

import survival_faults
import survival_signal
from etils import epath
from survival import Result
from survival_pair import HERE, Ends, Pair

from podracer import exits, manifest, shelf

# A host whose process ends is missed at once, where its machine is there: the kernel closes its connections.
SOON_S = 10.0
TRAIN = """--agent a2c --network.hidden 8 --batch-per-core 2 --unroll-length 5 --updates-per-call 20
    --total-steps 100000000 --checkpoint-every-s 1 --or-resume"""
CALL = 4 * 2 * 5 * 20  # steps: cores, environments, unroll, updates
CATCH = ["--env", "catch", "--env.rows", "5", "--env.columns", "3"]


def _train(run: pathlib.Path, env: list[str], evaluations: int, *more: str) -> list[str]:
    return ["train", "anakin", *env, *TRAIN.split(), "--evaluations", str(evaluations), "--run", str(run), *more]


def _steps(run: pathlib.Path) -> int:
    """Of the newest complete checkpoint of a run; -1: there is none."""
    folder = run / "checkpoints"
    if not folder.exists():
        return -1
    found = shelf.Shelf(epath.Path(folder), 2, None)
    return max((shelf.parse(n)[0] for n in found.names() if manifest.exists(found.directory / n)), default=-1)


def _rows(run: pathlib.Path) -> list[dict]:
    """The rows that the first host wrote."""
    path, rows = run / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # the last one is being written
            rows.append(json.loads(line))
    return rows


def _last_row(run: pathlib.Path) -> int:
    """The steps of the last row of a call; 0: there is none."""
    return max((row["steps"] for row in _rows(run) if "updates" in row), default=0)


def _is_whole(run: pathlib.Path) -> bool:
    """Whether there is one row for each call from the first on: none was lost, or made twice."""
    steps = [row["steps"] for row in _rows(run) if "updates" in row]
    return steps == [CALL * number for number in range(1, len(steps) + 1)]


def _id(run: pathlib.Path) -> str:
    """Of the run: one that was begun anew has another."""
    return json.loads((run / "config.json").read_text())["id"]


def _quoted(pair: Pair) -> str:
    return "".join(f"\n   -- host {host} said:\n{pair.said(host)[-1500:]}" for host in pair.processes)


# b: one host dies


def lost_hosts(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """One run that is started again each time that one of its hosts was killed, or raised."""
    rng, run = random.Random(seed), folder / "run"
    what = f"one of two hosts killed or raising: the other says so and ends within {SOON_S:.0f} s, status 71"
    result, slowest = Result("b", f"{what}; the run goes on from its last checkpoint", 0, 0), 0.0
    # SIGABRT is what a failed assertion in a library comes to; SIGUSR1 raises a Python exception.
    numbers = (signal.SIGKILL, signal.SIGUSR1, signal.SIGABRT)
    command = _train(run, ["--env", f"{HERE}/survival_faults.py:signalled"], 0)
    at, name = -1, None
    for number in range(times + 1):  # the last start is left alone
        with Pair(command, folder) as pair:
            goes_on = pair.until(lambda at=at: _steps(run) > at)
            name = name or (_id(run) if goes_on else None)
            if not goes_on or _id(run) != name or not _is_whole(run):
                result.failures.append(f"start {number} does not go on from {at}:{_quoted(pair)}")
                result.good -= result.good > 0
                break
            if number == times:
                break
            time.sleep(rng.uniform(0, 3))
            fault, victim, at = numbers[number % len(numbers)], rng.choice((0, 1)), _steps(run)
            pair.mark()
            began = time.time()
            pair.send(victim, fault)
            ends = pair.ends(began, 90)
            if fault == signal.SIGUSR1:
                words, status = f"RuntimeError: {survival_signal.TEXT}", (exits.INTERNAL,)
                problem = _after_fault(pair, ends, victim, status, words, SOON_S)
            else:
                problem = _after_fault(pair, ends, victim, (-fault,), None, SOON_S)
            if (after := _steps(run)) < at:
                problem += f"; the checkpoint of {at} steps is lost"
            at = after  # one may have been completed since
            result.add(problem and f"host {victim}, {fault.name}: {problem}; {ends}{_quoted(pair)}")
            slowest = max(slowest, 0.0 if problem else ends.latest)
    result.notes = f"all gone after {slowest:.1f} s at most"
    return [result]


def _after_fault(
    pair: Pair, ends: Ends, victim: int, expected: tuple[int, ...], words: str | None, seconds: float
) -> str:
    """What is wrong with the ends of two hosts after a fault of one of them; an empty string: nothing.

    Args:
      pair: the hosts.
      ends: how they ended.
      victim: which of them has the fault.
      expected: statuses that it may end with.
      words: what it says, and the other of it; None: it ends without a word.
      seconds: the deadline of both, from the fault on.
    """
    other, problems = 1 - victim, []
    # Where nothing moves any more, the other may see it before it hears of it.
    by_itself = exits.STALLED in expected and ends.status(other) == exits.STALLED
    if ends.status(victim) not in expected or not (by_itself or ends.status(other) == exits.PEER_LOST):
        problems.append("other statuses")
    if ends.latest > seconds:
        problems.append("too late")
    if words is not None and words not in pair.said(victim):
        problems.append(f"host {victim} does not say '{words}'")
    means = f"host {victim} has ended without a word"
    if words is not None:
        means = "" if by_itself else f"host {victim} has failed with status {ends.status(victim)}: "
    if means not in pair.said(other) or (words or "") not in pair.said(other):
        problems.append(f"host {other} does not say '{means}{words or ''}'")
    if left := pair.left():
        problems.append(f"processes of hosts {left} are left")
    return "; ".join(problems)


# c: SIGTERM

MOMENTS = ("between calls", "at the start", "in an evaluation")
TOLD = ((0, 1), (1,), (0,))


def signals(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """A signal to both hosts or one: both stop after one update, which is in the checkpoint; then on from there."""
    rng = random.Random(seed)
    result = Result("c", "SIGTERM to both hosts or one of them: same update on both, status 75, no update lost", 0, 0)
    counts = dict.fromkeys((*MOMENTS, "to one host alone", "of these before the hosts had met"), 0)
    slowest, start_s = 0.0, 5.0
    for number in range(times):
        moment, told = MOMENTS[number % len(MOMENTS)], TOLD[number // len(MOMENTS) % len(TOLD)]
        fresh = moment == MOMENTS[1] and number // len(MOMENTS) % 2 == 1
        run = folder / ("fresh" if fresh else "evaluated" if moment == MOMENTS[2] else "run")
        if fresh and _steps(run) >= 0:
            shutil.rmtree(run)
        # An evaluation after each call, of more seconds than the call takes.
        evaluated = (125_000, "--eval-episodes", "65536") if moment == MOMENTS[2] else (0,)
        at = _steps(run)
        name = _id(run) if at >= 0 else None
        with Pair(_train(run, CATCH, *evaluated, "--hosts-timeout", "15"), folder) as pair:
            there = pair.until(pair.listens)
            began = time.monotonic()
            if moment == MOMENTS[1]:
                time.sleep(rng.uniform(0, 0.8 * start_s))
            else:
                there = there and pair.until(lambda run=run, at=at: _last_row(run) > max(at, 0))
                start_s = time.monotonic() - began
                time.sleep(rng.uniform(0, 2))
                if moment == MOMENTS[2]:
                    there = there and pair.until(lambda run=run: "updates" in _rows(run)[-1])
            if not there:
                result.add(f"{moment}: does not start:{_quoted(pair)}")
                continue
            counts[MOMENTS[0] if moment == MOMENTS[1] and _last_row(run) > max(at, 0) else moment] += 1
            counts["to one host alone"] += len(told) == 1
            sent = time.time()
            for host in told:
                pair.send(host, signal.SIGTERM)
            ends = pair.ends(sent, 60)
            alone = moment == MOMENTS[1] and _alone(pair, ends, told)
            counts["of these before the hosts had met"] += alone
            problem = _after_signal(pair, ends, run, at, moment, alone)
            if at >= 0 and _id(run) != name:
                problem += "; begun anew"
            words = f"{moment}{' of a new run' if fresh else ''}, to {told}: {problem}; {ends}"
            words += f"; checkpoint {at} then {_steps(run)}, last row {_last_row(run)}{_quoted(pair)}"
            result.add(problem and words)
            slowest = max(slowest, 0.0 if problem or alone else ends.latest)
        if problem:  # rows without a checkpoint, where it had to be killed, would be taken for those of the next start
            shutil.rmtree(run, ignore_errors=True)
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    result.notes = f"{said}; stopped after {slowest:.1f} s at most"
    return [result]


def _alone(pair: Pair, ends: Ends, told: tuple[int, ...]) -> bool:
    """Whether one was told so early that the other did not know it yet: that one waits, and names it."""
    other = 1 - told[0]
    early = len(told) == 1 and ends.status(told[0]) == exits.PREEMPTED and ends.status(other) == exits.PEER_LOST
    return early and f"podracer: host {told[0]} did not come to {pair.address} within 15 s" in pair.said(other)


def _after_signal(pair: Pair, ends: Ends, run: pathlib.Path, at: int, moment: str, alone: bool) -> str:
    """What is wrong with the end of two hosts after SIGTERM; an empty string: nothing."""
    problems, steps = [], _steps(run)
    if not alone and any(ends.status(host) != exits.PREEMPTED for host in pair.processes):
        problems.append("other statuses")
    stops = [re.findall(r"stopped at ([\d,]+) steps; go on with: podracer resume", pair.said(h)) for h in (0, 1)]
    # Who is told before anything is trained has nothing to save, and nothing to say.
    if stops != [[f"{steps:,}"]] * 2 and not (stops == [[], []] and moment == MOMENTS[1] and steps == at):
        problems.append(f"stopped at {stops}")
    if steps < at or max(steps, 0) != _last_row(run) or not _is_whole(run):
        problems.append("updates are lost")
    if any("Traceback" in pair.said(host) for host in pair.processes):
        problems.append("a traceback")
    if left := pair.left():
        problems.append(f"processes of hosts {left} are left")
    return "; ".join(problems)


# f: one host is missing

TIMEOUT_S = 10


def missing_hosts(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """The other one waits for so long as it was told, and says whom for."""
    what = "one of two hosts does not start: the other names it and ends by its deadline, status 71"
    result = Result("f", what, 0, 0)
    for number in range(times):
        mine, other = number % 2, 1 - number % 2
        began = time.time()
        command = _train(folder / f"run{number}", CATCH, 0, "--hosts-timeout", str(TIMEOUT_S))
        with Pair(command, folder, [mine]) as pair:
            ends, said = pair.ends(began, 120), pair.said(mine)
            here = "got 1 of 2 hosts" if mine == 0 else "this is host 1"
            words = f"podracer: host {other} did not come to {pair.address} within {TIMEOUT_S} s ({here}). "
            good = ends.status(mine) == exits.PEER_LOST and TIMEOUT_S < ends.latest < 2 * TIMEOUT_S
            good = good and said.startswith(words) and said.count("\n") == 1 and not pair.left()
            result.add("" if good else f"{ends}: expected '{words}'{_quoted(pair)}")
            result.notes += f"{ends.latest:.0f} s "
    return [result]


# h: faults of threads

PLACES = ("environment", "policy", "learner")
STALL_S = 20  # --stall-timeout
# How a fault ends its own host, what that says, and seconds from the fault to the end of both.
FAULTS: dict[str, tuple[tuple[int, ...], str | None, float]] = {
    # What a user's own file raises is the user's to mend; from a compiled program it comes as an error of JAX.
    "raise": ((exits.BAD_INPUT, exits.INTERNAL), survival_faults.TEXT, 5.0),
    "exit": ((survival_faults.STATUS,), None, 5.0),
    "hang": ((exits.STALLED,), "no sign of life", STALL_S + 8.0),
}


def faults(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """Environments, policies and learners that raise, end their process, or hang, on either host."""
    what = "Sebulba: environment, policy or learner raises, crashes or hangs on one of two hosts: both end, and say why"
    result, slowest = Result("h", what, 0, 0), dict.fromkeys(FAULTS, 0.0)
    cases = [(fault, place, host) for fault in FAULTS for place in PLACES for host in (0, 1)]
    for number in range(times):
        fault, place, host = cases[number % len(cases)]
        fired = folder / f"fired{number}"
        agent = f"{HERE}/survival_faults.py:faulty_impala"
        command = f"""train sebulba --env {HERE}/survival_faults.py:FaultyCatch --agent {agent} --actor-cores 1
            --threads-per-core 1 --unroll-length 5 --no-probe --evaluations 0 --total-steps 10000000
            --stall-timeout {STALL_S} --run {folder}/run{number}"""
        variables = {"FAULT": fault, "FAULT_WHERE": place, "FAULT_HOST": str(host), "FAULT_FILE": str(fired)}
        with Pair(command.split(), folder, **variables) as pair:
            pair.until(fired.exists)
            fell = fired.stat().st_mtime if fired.exists() else time.time()
            statuses, words, seconds = FAULTS[fault]
            ends = pair.ends(fell, seconds + 60)
            problem = _after_fault(pair, ends, host, statuses, words, seconds)
            if not fired.exists():
                problem = "the fault did not come; " + problem
        result.add(problem and f"{fault} in the {place} of host {host}: {problem}; {ends}{_quoted(pair)}")
        slowest[fault] = max(slowest[fault], 0.0 if problem else ends.latest)
    after = ", ".join(f"{seconds:.1f} s ({fault})" for fault, seconds in slowest.items() if seconds)
    result.notes = f"both gone after at most {after}"
    return [result]


PARTS = {"b": lost_hosts, "c": signals, "f": missing_hosts, "h": faults}
