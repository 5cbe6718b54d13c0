"""Parts a, d, e and g of `survival.py`: one host."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np
import survival_forks as forks
from etils import epath
from survival import Result

from podracer import config, manifest, saving, shelf
from podracer.checkpoint import Checkpoints

CORES = (1, 2, 4, 8)
CALLS = 100


# a: kill -9


def kills(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """Runs that are killed again and again, and then compared with one that never was."""
    results = []
    for number, cores in enumerate(CORES):
        count = times // len(CORES) + (number < times % len(CORES))
        if count:
            results.append(_kills(cores, count, random.Random(seed + cores), folder))
    return results


def _kills(cores: int, count: int, rng: random.Random, folder: pathlib.Path) -> Result:
    """`count` kills of runs on so many cores; each that comes to its end is compared."""
    reference, directory = folder / f"reference-{cores}", folder / f"run-{cores}"
    output, settings = folder / f"output-{cores}", {"checkpoint_every_s": 0.3}
    began = time.monotonic()
    for _ in range(2):  # the second one finds its programs compiled, as the others do
        shutil.rmtree(reference, ignore_errors=True)
        started = time.monotonic()
        child = forks.start(lambda: forks.train_or_resume(reference, cores, CALLS), output=output)
        assert forks.wait(child, 600) == 0, output.read_text()
    whole_s = time.monotonic() - started
    result = Result("a", f"kill -9, {cores} core{'s' if cores > 1 else ''}", 0, 0)
    writing = finished = equal = lost = 0
    while result.tried < count or directory.exists() or not finished:
        child = forks.start(lambda: forks.train_or_resume(directory, cores, CALLS, **settings), output=output)
        ended = None
        if result.tried < count:
            in_write = writing < (result.tried + 1) / 3
            ended = _until_the_moment(child, directory, in_write, rng, 1.2 * whole_s)
            if ended is None:
                before = _newest(directory)
                ended = forks.kill(child)
                if ended < 0:
                    result.tried += 1
                    left = _half_written(directory)
                    writing += left
                    good = _newest(directory) >= before
                    result.good += good
                    lost += not good
                    continue
        else:
            ended = forks.wait(child, 600)
        finished += 1
        state = directory / "state.npz"
        if ended == 0 and forks.same(*(list(np.load(each / "state.npz").values()) for each in (directory, reference))):
            equal += 1
        else:
            result.failures.append(f"status {ended}, {state.exists()}: {output.read_text()[-1500:]}")
            result.good -= result.good > 0
        shutil.rmtree(directory)
    result.notes = f"{writing} during a write; {equal}/{finished} finished runs bit-identical; {lost} checkpoints lost"
    result.seconds = time.monotonic() - began
    return result


def _until_the_moment(child: int, directory: Any, in_write: bool, rng: random.Random, span_s: float) -> int | None:
    """Wait for the moment to kill: any, or when a checkpoint is being written. The status, if it ended before."""
    ended = forks.wait(child, rng.uniform(0, span_s))
    if ended is not None or not in_write:
        return ended
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if _half_written(directory):
            time.sleep(rng.uniform(0, 0.05))
            return None
        ended = forks.wait(child, 0)
        if ended is not None:
            return ended
    return None


def _half_written(directory: pathlib.Path) -> bool:
    checkpoints = directory / "checkpoints"
    return checkpoints.exists() and any(shelf.TEMPORARY in path.name for path in checkpoints.iterdir())


def _newest(directory: pathlib.Path) -> int:
    """The steps of the newest checkpoint that is whole, by its hashes; -1: there is none."""
    checkpoints = directory / "checkpoints"
    if not checkpoints.exists():
        return -1
    found = shelf.Shelf(epath.Path(checkpoints), 2, None)
    for name in reversed(found.names()):
        with contextlib.suppress(FileNotFoundError):
            if not isinstance(found.verify(name), Exception):
                return shelf.parse(name)[0]
    return -1


# d: damaged checkpoints

KINDS = ("cut short", "bit flipped", "file missing", "of another run", "another dtype")


def damages(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """Damage the newest of two checkpoints, then read as `resume` does: it is named, and the other one is read."""
    for name, seconds in (("one", 0), ("other", 0)):
        arguments = {"checkpoint_every_s": seconds, "evaluations": 2, "seed": len(name)}
        child = forks.start(
            lambda name=name, arguments=arguments: forks.train_or_resume(folder / name, 2, 4, **arguments),
            output=folder / "output",
        )
        assert forks.wait(child, 600) == 0, (folder / "output").read_text()
    answer = folder / "answer.json"
    child = forks.start(lambda: _damages(times, seed, folder, answer), output=folder / "output")
    assert forks.wait(child, 3600) == 0, (folder / "output").read_text()
    return [Result(**each) for each in json.loads(answer.read_text())]


def _damages(times: int, seed: int, folder: pathlib.Path, answer: pathlib.Path) -> None:
    forks._start_jax(2)
    original = saving.open_checkpoints(folder / "one")
    older, newer = original.steps()
    like = {item: _like(original, item, newer) for item in ("params", "state")}
    expected = [forks.leaves(getattr(original, item)(like[item], older)) for item in like]
    results = {kind: Result("d", f"checkpoint damaged: {kind}", 0, 0) for kind in KINDS}
    for number in range(times):
        kind, rng = KINDS[number % len(KINDS)], random.Random(seed * 10**6 + number)
        shutil.rmtree(folder / "copy", ignore_errors=True)
        shutil.copytree(folder / "one", folder / "copy")
        what = _damage(kind, folder, str(newer), like, rng)
        said, checkpoints = io.StringIO(), saving.open_checkpoints(folder / "copy")
        result = results[kind]
        result.tried += 1
        try:
            with contextlib.redirect_stderr(said):
                meta, _ = checkpoints.choose(lambda meta: (None, like))
                found = [forks.leaves(getattr(checkpoints, item)(like[item])) for item in like]
            named = "cannot be read" in said.getvalue() and said.getvalue().count("\n") == 1
            good = named and meta["steps"] == older and all(map(forks.same, found, expected))
        except Exception as error:
            good = False
            said.write(repr(error))
        result.good += good
        if not good:
            result.failures.append(f"{what}: {said.getvalue()}")
    answer.write_text(json.dumps([vars(each) for each in results.values() if each.tried]))


def _like(checkpoints: Checkpoints, item: str, steps: int) -> dict[str, Any]:
    """Arrays as an item of a checkpoint has them, by name."""
    described = manifest.read(checkpoints.directory / str(steps))["leaves"][item]
    shapes = {name: text.partition("[") for name, text in described.items()}
    return {name: np.zeros(json.loads("[" + shape), dtype) for name, (dtype, _, shape) in shapes.items()}


def _damage(kind: str, folder: pathlib.Path, name: str, like: dict[str, Any], rng: random.Random) -> str:
    """Damage the newest checkpoint of `copy`; what was done."""
    target = folder / "copy" / "checkpoints" / name
    if kind == "of another run":
        shutil.rmtree(target)
        shutil.copytree(folder / "other" / "checkpoints" / name, target)
        return kind
    if kind == "another dtype":
        run = config.read(folder / "copy")["id"]
        whole = saving.open_checkpoints(folder / "copy")
        items, meta = {item: dict(getattr(whole, item)(like[item])) for item in like}, whole.meta()
        item = rng.choice(list(items))
        leaf = rng.choice([each for each in items[item] if items[item][each].dtype == np.float32])
        items[item][leaf] = np.asarray(items[item][leaf]).astype(np.float16)
        shutil.rmtree(target)
        shutil.rmtree(folder / "copy" / "aside", ignore_errors=True)
        aside = Checkpoints(folder / "copy" / "aside", run=run)
        aside.save(int(name), items["params"], items["state"], meta)
        aside.close()
        (folder / "copy" / "aside" / name).rename(target)
        return f"{kind}: {leaf}"
    files = [*manifest.read(epath.Path(target))["files"], manifest.NAME]
    path = target / rng.choice(files)
    content = bytearray(path.read_bytes())
    if kind == "file missing":
        path.unlink()
    elif kind == "cut short":
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    return f"{kind}: {path}"


# e: a full disk


def full_disks(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """A small disk of its own for each try, seen by the run alone."""
    results = []
    for scenario in list(SCENARIOS)[:times]:
        (folder / "disk").mkdir(exist_ok=True)
        line = ["unshare", "-rm", sys.executable, __file__, scenario, str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[1])}
        done = subprocess.run(line, capture_output=True, text=True, timeout=600, env=environment)
        good = done.returncode == 0 and done.stdout.splitlines()[-1:] == ["good"]
        failures = [] if good else [done.stdout + done.stderr]
        results.append(Result("e", SCENARIOS[scenario], int(good), 1, failures=failures))
    return results


SCENARIOS = {
    "stays": "disk full, and stays so: training goes on, stops after a limit with status 70, last checkpoint whole",
    "freed": "disk full for a while: training goes on, to its end with its last checkpoint",
    "files": "no more files on the disk: as the first",
}


def _full_disk(scenario: str, folder: pathlib.Path) -> None:
    """In a name space of its own: mount, train, fill, look."""
    disk, output = folder / "disk", folder / "output"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m,nr_inodes=2k", "none", str(disk)], check=True)
    run, settings = disk / "run", {"checkpoint_every_s": 0.5, "checkpoint_max_age_s": 5, "evaluations": 0}
    calls = 10**7 if scenario != "freed" else 10**5
    line = lambda: _exit_status(forks.train_or_resume, run, 2, calls, **settings)
    child = forks.start(line, output=output)
    while _newest(run) < 0:
        assert forks.wait(child, 0.05) is None, output.read_text()
    filled = time.monotonic()
    if scenario == "files":
        with contextlib.suppress(OSError):
            for number in range(3000):
                (disk / f"ballast{number}").touch()
    else:
        with contextlib.suppress(OSError), open(disk / "ballast", "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
    if scenario == "freed":
        while "could not be written" not in output.read_text():
            assert forks.wait(child, 0.05) is None, output.read_text()
        assert forks.wait(child, 2) is None, output.read_text()  # it goes on
        (disk / "ballast").unlink()
        seen = _newest(run)
        while _newest(run) <= seen:  # and saves again
            assert forks.wait(child, 0.05) is None, output.read_text()
        forks.kill(child)
        print("good")
        return
    status, lasted_s, text = forks.wait(child, 120), time.monotonic() - filled, output.read_text()
    assert status == 70 and lasted_s > 1, (status, lasted_s, text)
    assert "Training goes on" in text and "training stopped: no checkpoint could be written for 5 s" in text, text
    assert "Traceback" not in text and not _half_written(run), text
    for path in disk.glob("ballast*"):
        path.unlink()
    assert _newest(run) > 0
    print("good")


def _exit_status(function: Any, *arguments: Any, **settings: Any) -> int:
    """What the command line would end with."""
    from podracer.errors import NotSaved

    try:
        return function(*arguments, **settings)
    except NotSaved as error:
        print(f"podracer: {error}", file=sys.stderr)
        return error.exit_status


# g: bad command lines


def mistakes(times: int, seed: int, folder: pathlib.Path) -> list[Result]:
    """Status 2, one line, before anything is compiled, and nothing is left behind."""
    import survival_mistakes

    result, output = (
        Result("g", "bad command line: status 2, one line, nothing compiled or written", 0, 0),
        folder / "out",
    )
    (folder / "taken").mkdir()
    (folder / "file").write_text("x")
    for line in survival_mistakes.lines(folder)[:times]:
        before = sorted(folder.iterdir())
        child = forks.start(lambda line=line: forks.command(line), output=output)
        status = forks.wait(child, 120)
        if status is None:
            forks.kill(child)
        said = output.read_text()
        output.unlink()
        result.tried += 1
        good = status == 2 and said.count("\n") == 1 and "Traceback" not in said and "compiled" not in said
        good = good and sorted(folder.iterdir()) == before
        result.good += good
        if not good:
            result.failures.append(f"{' '.join(line)}: status {status}: {said[-300:]}")
    return [result]


PARTS = {"a": kills, "d": damages, "e": full_disks, "g": mistakes}

if __name__ == "__main__":
    os.chdir(sys.argv[2])
    _full_disk(sys.argv[1], pathlib.Path(sys.argv[2]))
