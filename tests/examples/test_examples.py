"""The examples run as they are, from Python and from the command line, and the documentation quotes them truly."""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# Script -> (its argument, what its last line looks like).
SCRIPTS = {
    "my_env": ("4000", r"drone after 4,096 steps: mean return \d+\.\d of 100"),
    "my_agent": ("4000", r"reinforce on catch after 4,320 steps: mean return -?\d\.\d\d of 1"),
    "my_network": ("4000", r"gridworld after 4,096 steps: \d+% of the goals reached"),
    "seeds": ("1000", r"curves: runs/seeds-[\d-]+/curves\.png"),
    "by_hand": ("1", r"greedy: mean return -?\d\.\d\d of 1"),
}
SMALL = "--total-steps 2048 --batch-per-core 8 --unroll-length 16 --evaluations 1 --eval-episodes 8 --cores 1"
COMMANDS = {
    "env": f"--env {EXAMPLES}/my_env.py:Drone --env.gust 0.03 --agent a2c {SMALL}",
    "agent": f"--env catch --agent {EXAMPLES}/my_agent.py:make --agent.learning-rate 0.001 {SMALL}",
    "network": f"--env gridworld --agent a2c --network {EXAMPLES}/my_network.py:recipe --network.blocks 1 {SMALL}",
}
# All three commands in one process: starting JAX costs more than training this little.
ALL_COMMANDS = """
import sys
from launch.cli import main
for line in sys.argv[1:]:
    main(["train", "anakin", *line.split()])
"""


def _run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess:
    folder.mkdir()
    # Compiling is nearly all of the time here, and these programs need not be fast.
    quick = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "xla"), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    quick["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    quick["JAX_NUM_CPU_DEVICES"] = "1"  # two at a time, without waiting for each other
    environment = os.environ | quick
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, subprocess.CompletedProcess]:
    """Everything, two at a time."""
    folder = tmp_path_factory.mktemp("examples")
    jobs = {name: [str(EXAMPLES / f"{name}.py"), argument] for name, (argument, _) in SCRIPTS.items()}
    lines = [f"{line} --run {name}" for name, line in COMMANDS.items()]
    jobs = {"commands": ["-c", ALL_COMMANDS, *lines], **jobs}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(_run, arguments, folder / name) for name, arguments in jobs.items()}
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_example_runs_and_says_what_came_of_it(finished, name):
    done = finished[name]
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(SCRIPTS[name][1], done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_example_works_from_the_command_line(finished, name):
    done = finished["commands"]
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{name}: 2,048 steps; best evaluation", done.stdout, re.MULTILINE), done.stdout


def test_examples_are_all_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("page", ["README.md", "docs/extending.md"])
def test_documentation_quotes_the_examples(page):
    """A Python block that starts with `# examples/x.py` holds lines of that file; `...` stands for left-out ones."""
    blocks = re.findall(r"```python\n# (examples/\w+\.py)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for file, block in blocks:
        text = (ROOT / file).read_text()
        for part in re.split(r"^ *\.\.\.\n", block, flags=re.MULTILINE):
            assert part.strip("\n") in text, f"{page} quotes lines that {file} does not have:\n{part}"
