"""What is typed into the shell of a TPU host: install, start, follow, ask, stop. Each is a script for `sh`.

Everything lives in the folder podracer/NAME of the user that gcloud logs in as. The training process outlives the
connection that started it; what it says goes to `train.log`, and its exit status to `status` when it ends.
"""

from __future__ import annotations

import shlex

ENVIRONMENT = {
    "JAX_PLATFORMS": "tpu",  # rather fail than train on the host's CPU
    # JAX's own port, 8482, is not in the firewall rule that Cloud TPU makes; 8476 is, and jax.distributed reads this.
    "JAX_COORDINATOR_PORT": "8476",
}
PYTHON = "3.11"  # the images bring 3.10
PIP = "python3 -m pip install --quiet --user"
FAILED = "podracer-failed"  # what a script says that fails by itself, so that one that was cut off can be told from it
_OR_SAY_SO = f"trap '[ $? = 0 ] || echo {FAILED} >&2' EXIT"
# Google's own way to install gcsfuse, which the images do not bring.
GCSFUSE = """\
if ! command -v gcsfuse > /dev/null; then
  curl -fsSL --retry 5 https://packages.cloud.google.com/apt/doc/apt-key.gpg | \
sudo tee /usr/share/keyrings/cloud.google.asc > /dev/null
  echo "deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt \
gcsfuse-$(lsb_release -cs) main" | sudo tee /etc/apt/sources.list.d/gcsfuse.list > /dev/null
  again sudo apt-get -o DPkg::Lock::Timeout=300 update -qq
  again sudo apt-get -o DPkg::Lock::Timeout=300 install -qq -y gcsfuse
fi"""


def folder(name: str) -> str:
    return f"podracer/{name}"


def archive(name: str) -> str:
    """The file that the project is copied as."""
    return f"podracer-{name}.tar.gz"


def run_directory(name: str, bucket: str | None) -> str:
    """Where the run is written, from `folder(name)`: in the bucket, or on the host's disk."""
    return f"bucket/{name}" if bucket else "run"


def install(name: str, requirement: str, constraints: str | None, bucket: str | None) -> str:
    """Unpack the project, make a Python of the right version, install into it; mount the bucket."""
    pins = f"-c {shlex.quote(constraints)} " if constraints else ""
    lines = [
        "set -e",
        _OR_SAY_SO,
        f"mkdir -p {folder(name)}",
        f"cd {folder(name)}",
        f"tar -xzf ../../{archive(name)}",
        # One of many hosts often cannot reach a registry for a moment.
        'again() { for wait in 5 20 60; do "$@" && return; sleep $wait; done; "$@"; }',
        f"get_uv() {{ {PIP} uv || {PIP} --break-system-packages uv; }}",
        "again get_uv",
        f"again python3 -m uv venv --quiet --allow-existing --python {PYTHON} .venv",
        f"again python3 -m uv pip install --quiet --python .venv/bin/python {pins}{shlex.quote(requirement)}",
    ]
    if bucket:
        lines += [GCSFUSE, *_mount(bucket)]
    return "\n".join(lines)


def _mount(bucket: str) -> list[str]:
    # Checkpoints become visible by renaming their folder, which gcsfuse has to be allowed.
    options = "--implicit-dirs --rename-dir-limit=200000"
    return ["mkdir -p bucket", f"mountpoint -q bucket || gcsfuse {options} {shlex.quote(bucket)} bucket"]


# Only a process that has not left its status runs: its number may be another one's by now.
RUNNING = '[ -f pid ] && [ ! -f status ] && kill -0 "$(cat pid)" 2> /dev/null'


def start(name: str, command: list[str], bucket: str | None, mark: str) -> str:
    """Start the command, once, detached from this connection; nothing where a script with this mark has done so."""
    settings = " ".join(f"{key}={value}" for key, value in ENVIRONMENT.items())
    words = shlex.join([".venv/bin/podracer", *command[1:]])
    # `stop` sends SIGTERM to all of them; the shell stays, for the status.
    inner = f"trap : TERM; {words} >> train.log 2>&1; echo $? > status.new; mv status.new status"
    return "\n".join(
        [
            "set -e",
            _OR_SAY_SO,
            f"cd {folder(name)}",
            f'if [ "$(cat started 2> /dev/null)" = {mark} ]; then exit 0; fi',
            f'if {RUNNING}; then echo "it is running already" >&2; exit 3; fi',
            *(_mount(bucket) if bucket else []),
            "rm -f status",
            "touch train.log",
            f"{settings} setsid nohup sh -c {shlex.quote(inner)} < /dev/null > /dev/null 2>&1 &",
            "echo $! > pid",
            f"echo {mark} > started",
        ]
    )


def follow(name: str, line: int) -> str:
    """Print what the process of this host says, from this line (of 1, 2, ...) on, until it ends."""
    return f'cd {folder(name)} && tail --pid="$(cat pid)" -n +{line} -F train.log'


STATUS = "podracer-status"


def status(name: str) -> str:
    """Say `podracer-status WORKER STATUS`, with `running` or `lost` for a process that has not left one.

    `none` is a host on which nothing was installed.
    """
    worker = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number"
    return "\n".join(
        [
            f"worker=$(curl -sf -H 'Metadata-Flavor: Google' {worker} || hostname)",
            f'cd {folder(name)} 2> /dev/null || {{ echo "{STATUS} $worker none"; exit 0; }}',
            f"if [ -f status ]; then s=$(cat status); elif {RUNNING}; then s=running; else s=lost; fi",
            f'echo "{STATUS} $worker $s"',
        ]
    )


def stop(name: str) -> str:
    """Ask the process to save and end; after 60 s, end it."""
    return "\n".join(
        [
            f"cd {folder(name)} || exit 0",
            f"running() {{ {RUNNING}; }}",
            "running || exit 0",
            # The form of `kill` that every sh knows for a group of processes.
            'kill -s TERM -- "-$(cat pid)"',
            "for second in $(seq 60); do running || exit 0; sleep 1; done",
            'kill -s KILL -- "-$(cat pid)"',
            # Until whoever took it over has buried it, a process that was killed still looks alive.
            "for second in $(seq 10); do running || exit 0; sleep 1; done",
        ]
    )


def log(name: str) -> str:
    """The file that holds what the process of a host says, from the home folder."""
    return f"{folder(name)}/train.log"


def end_of_log(name: str, lines: int) -> str:
    """Print the last lines of what the process of this host said."""
    return f"tail -n {lines} {log(name)}"


def pack(name: str) -> str:
    """Put the run directory of this host into one file."""
    # 1: a file changed or went away meanwhile, as checkpoints do where the training goes on.
    tar = "tar -czf run.tar.gz run train.log || [ $? = 1 ]"
    lines = ["set -e", _OR_SAY_SO, f"cd {folder(name)}", "mkdir -p run", tar]
    return "\n".join(lines)
