"""`podracer launch tpu-vm [STEP] --name NAME --type TYPE --zone ZONE [OPTIONS] -- train ...`."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import sys
from typing import Any, Literal

from launch import agent_key, prices, project, rehearsal, remote, slices
from launch.compute import InstanceGroup
from launch.lifecycle import Launch
from launch.parse import parse
from launch.patience import CutOff
from launch.queued import QueuedResource
from launch.steps import Plan
from launch.tools import ToolFailed, Tools, require
from launch.words import Form, check_bucket, check_name, needs_bucket, say, split, training_command
from podracer.errors import UserError, check_number, closest

STEPS = ("create", "copy", "install", "start", "logs", "status", "fetch", "delete")
ZONE = Form(r"[a-z]+-[a-z]+\d+-[a-z]", "a zone, as in us-west4-a")
PROJECT = Form(
    r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]",
    "the ID of a project, 6 to 30 small letters, digits and -, as in my-project",
)
ACCOUNT = Form(r"[a-z0-9-]+@[a-z0-9.-]+", "an account, as in trainer@my-project.iam.gserviceaccount.com")
IMAGE = Form(r"[A-Za-z0-9._-]+", "letters, digits, ., _ and -, as in v2-alpha-tpuv5-lite")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `launch tpu-vm`."""

    name: str
    """Name of the slice, the run and the label by which it is known as ours."""
    zone: str
    """Zone, such as us-west4-a."""
    type: str | None = None
    """Slice, such as v5litepod-16 or v4-32; needed to create one."""
    project: str | None = None
    """Google Cloud project; None takes that of gcloud's configuration (an instance group needs it here)."""
    spot: bool = False
    """Take a cheaper slice that may be taken away at any time."""
    bucket: str | None = None
    """gs://NAME: the run is written there, and survives the slice. None: on the hosts' disks."""
    max_restarts: int = 0
    """How often to start again where that may help (see docs/cloud.md), also with a new slice for one taken away."""
    out: str | None = None
    """Folder for the run when it is fetched; None: runs/NAME."""
    source: str = "."
    """Project to copy and install: a checkout with a pyproject.toml."""
    install: str = ".[tpu]"
    """What pip installs in the copied project."""
    api: Literal["queued-resource", "compute-engine"] | None = None
    """How to ask for the slice; None takes the way of its generation."""
    service_account: str | None = None
    """Service account of the hosts; None takes the project's default one, which may do more than it needs."""
    image: str | None = None
    """Runtime version or image family of the hosts; None takes that of the generation."""
    wait_hours: float = 24.0
    """How long to wait for the slice."""
    price_per_chip_hour: float | None = None
    """USD, where the table has no price or another one."""
    keep: bool = False
    """Leave the slice at the end; it goes on costing money."""
    dry_run: bool = False
    """Print the commands and the price, and do nothing."""


def main(arguments: list[str]) -> None:
    """One step, or without a name of one all of them."""
    arguments, command = split(arguments)
    step = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if step is not None and step not in STEPS:
        raise UserError(f"unknown step '{step}'.{closest(step, STEPS)} Expected {', '.join(STEPS)}, or none for all.")
    text = f"Train on a Cloud TPU slice: all steps, or only one of {', '.join(STEPS)}."
    prog = "podracer launch tpu-vm" + (f" {step}" if step else "")
    options = parse(Options, arguments[1:] if step else arguments, prog, text)
    _check(options)
    tools = Tools(options.dry_run)
    piece = slices.parse(options.type) if options.type else None
    launch = _make(options, step, command, tools, piece)
    if not options.dry_run:
        if piece is not None and piece.hosts > 1 and options.bucket is None and step in (None, "create", "start"):
            raise UserError(needs_bucket(piece))
        require("gcloud")
        if piece is not None and piece.hosts > 1 and step in (None, "create"):
            agent_key.check()
    if command:
        place = rehearsal.on_slice(piece) if piece else rehearsal.Place(1, platforms=("tpu",))
        source = pathlib.Path(options.source)
        with contextlib.chdir(source if source.is_dir() else "."):  # files that the command names are copied from there
            rehearsal.check(training_command(command, options.name), place)
    if piece is not None and step in (None, "create"):
        _announce(options, piece)
    try:
        status = _do(step, launch)
    except CutOff as error:
        launch.left_alone(error)
        sys.exit(1)
    except ToolFailed as error:
        say(f"podracer: {error}")
        sys.exit(1)
    if status:
        sys.exit(status)


def _do(step: str | None, launch: Launch) -> int:
    """Run the step; the exit status."""
    if step is None:
        # A launcher that is told to end (by a closed terminal, say) must not leave a slice that costs money.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        return launch.run()
    if step == "logs":
        return launch.logs()
    getattr(launch, "show_state" if step == "status" else step)()
    return 0


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(f"ended by signal {number}")


def _check(options: Options) -> None:
    """Refuse what cannot work before anything costs money."""
    check_name("--name", options.name)
    check_name("--zone", options.zone, ZONE)
    for flag, value, form in (
        ("--project", options.project, PROJECT),
        ("--service-account", options.service_account, ACCOUNT),
        ("--image", options.image, IMAGE),
    ):
        if value is not None:
            check_name(flag, value, form)
    check_bucket(options.bucket)
    check_number("--max-restarts", options.max_restarts, minimum=0)
    check_number("--price-per-chip-hour", options.price_per_chip_hour, minimum=0, exclusive=True)
    check_number("--wait-hours", options.wait_hours, minimum=0, exclusive=True)


def _make(options: Options, step: str | None, command: list[str], tools: Tools, piece: slices.Slice | None) -> Launch:
    """The launch of a slice."""
    creates = step in (None, "create")
    if creates and piece is None:
        raise UserError("--type is missing; expected a slice to create, such as --type v5litepod-16.")
    known = piece.generation.apis if piece else (slices.QUEUED, slices.COMPUTE)
    api = options.api or known[0]
    if api not in known:
        raise UserError(f"--api is {api}, which has no {options.type}; expected {' or '.join(known)}. Change --api.")
    if api == slices.COMPUTE and options.project is None:
        raise UserError("--project is missing; an instance group needs it. Give --project.")
    kind: Any = QueuedResource if api == slices.QUEUED else InstanceGroup
    where = kind(tools, options.name, options.zone, options.project, piece.hosts if piece else 1)
    bucket = check_bucket(options.bucket)
    if step in (None, "start"):
        command = training_command(command, remote.run_directory(options.name, bucket))
    elif command:
        raise UserError(f"{step} takes no training command; got '{command[0]}' after --. Leave it out.")
    out = pathlib.Path(options.out or f"runs/{options.name}")
    if step in (None, "fetch") and out.exists():
        raise UserError(f"{out} exists; expected a new folder for the run. Change --out.")
    create = where.create_commands(piece, options.spot, options.service_account, options.image) if creates else []
    source = pathlib.Path(options.source)
    if step in (None, "copy"):
        project.files(source)  # says now what is wrong with it
    wait_s = options.wait_hours * 3600
    flags = ["--name", options.name, "--zone", options.zone]
    flags += ["--project", options.project] if options.project else []
    flags += ["--api", api] if api == slices.COMPUTE else []
    price = _price(options, piece) if piece else "its price is not known here"
    plan = Plan(
        *(create, source, options.install, command, bucket, out, options.max_restarts, wait_s, options.keep),
        *(flags, price),
    )
    return Launch(tools, where, plan)


def _price(options: Options, piece: slices.Slice) -> str:
    return prices.per_hour(piece, options.zone, options.spot, options.price_per_chip_hour)


def _announce(options: Options, piece: slices.Slice) -> None:
    """What is about to be rented, and what it costs."""
    tell = print if options.dry_run else say
    mark = "# " if options.dry_run else ""
    tell(mark + piece.describe())
    tell(mark + _price(options, piece))
    if options.bucket is None and piece.hosts > 1:
        tell(f"{mark}{needs_bucket(piece)}")
    elif options.bucket is None and (options.spot or options.max_restarts):
        tell(mark + "without --bucket, checkpoints are lost with the slice: a new one begins from the start")
