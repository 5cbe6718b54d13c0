"""`podracer launch gke --name NAME --type TYPE --image IMAGE [OPTIONS] -- train ...`."""

from __future__ import annotations

import dataclasses
import shlex
import sys

from launch import container, jobset, manifest, prices, rehearsal, slices
from launch.parse import parse
from launch.tools import ToolFailed, Tools
from launch.words import Form, check_bucket, check_name, needs_bucket, say, split, training_command
from podracer.errors import UserError, check_number

IMAGE = Form(
    r"[a-z0-9][a-z0-9._/-]*(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?",
    "an image, as in us-docker.pkg.dev/my-project/my-images/podracer:1, with small letters before the :",
)
BASE = Form(r"[a-z0-9][A-Za-z0-9._/:@-]*", "an image, as in python:3.11-slim-bookworm")
WORD = Form(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "small letters, digits and -, at most 63, as in trainer")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `launch gke`."""

    name: str
    """Name of the JobSet and of the run."""
    type: str
    """Slice, such as v5litepod-16; the cluster needs a node pool of this kind."""
    image: str
    """Image to run; the Dockerfile that is rendered with it says how to build it."""
    bucket: str | None = None
    """gs://NAME: the run is written there, mounted by the Cloud Storage FUSE driver. None: lost with the pods."""
    spot: bool = False
    """Run on spot nodes."""
    max_restarts: int = 3
    """How often to start again after a failure; pre-emption does not count, bad input is never tried again."""
    namespace: str | None = None
    """Kubernetes namespace."""
    service_account: str | None = None
    """Kubernetes service account, for the bucket."""
    privileged: bool = False
    """Run as root with all rights of the node, for clusters on which TPUs do not work without."""
    base_image: str | None = None
    """What the image is built on; None: python:3.11-slim-bookworm."""
    region: str | None = None
    """Where the cluster is, for the price."""
    price_per_chip_hour: float | None = None
    """USD, where the table has no price or another one."""
    out: str | None = None
    """Folder for jobset.yaml and the Dockerfile; None prints them."""
    apply: bool = False
    """Create it with kubectl."""
    dry_run: bool = False
    """With --apply, only print the command."""


def main(arguments: list[str]) -> None:
    """Render, and where asked for apply."""
    text = "Render a JobSet for Google Kubernetes Engine with its Dockerfile, and create it with kubectl."
    arguments, command = split(arguments)
    options = parse(Options, arguments, "podracer launch gke", text)
    bucket, piece = _check(options), slices.parse(options.type)
    if jobset.accelerator(piece) is None:
        raise UserError(f"--type {options.type} is not there on GKE; expected v3 or newer. Change --type.")
    words = training_command(command, f"{jobset.RUNS}/{options.name}")
    job = jobset.Job(
        *(options.name, piece, options.image, words, bucket, options.spot, options.max_restarts),
        *(options.namespace, options.service_account, options.privileged),
    )
    if bucket is None and piece.hosts > 1 and options.apply and not options.dry_run:
        raise UserError(needs_bucket(piece))
    rehearsal.check(words, rehearsal.on_slice(piece))
    document = manifest.to_yaml(jobset.manifest(job))
    paths = manifest.write(
        options.out, {"jobset.yaml": document} | container.files(options.image, options.out, options.base_image)
    )
    say(piece.describe())
    say(prices.per_hour(piece, options.region, options.spot, options.price_per_chip_hour))
    if bucket is None:
        say(needs_bucket(piece) if piece.hosts > 1 else "without --bucket, the run is lost when its pod ends")
    if options.apply:
        _apply(document, options)
    elif paths:
        _say_next(options, paths)


def _apply(document: str, options: Options) -> None:
    """Create the JobSet. `kubectl apply` would find one of this name that has ended unchanged, and start nothing."""
    try:
        answer = Tools(options.dry_run).run(["kubectl", "create", "-f", "-"], stdin=document)
    except ToolFailed as error:
        say(f"podracer: {error}")
        if error.says_exists:
            namespace = ["--namespace", options.namespace] if options.namespace else []
            first = shlex.join(["kubectl", "delete", "jobset", options.name, *namespace])
            say(f"To start it again, from its newest checkpoint: {first}")
        sys.exit(1)
    print(answer, end="")


def _say_next(options: Options, paths: list[str]) -> None:
    namespace = ["--namespace", options.namespace] if options.namespace else []
    # Of all pods, kubectl would follow five at most, and mix what they say.
    first = f"jobset.sigs.k8s.io/jobset-name={options.name},batch.kubernetes.io/job-completion-index=0"
    follow = ["kubectl", "logs", *namespace, "-f", "-l", first]
    print("written:", *paths)
    print("next:")
    for words in (
        ["docker", "build", "-f", paths[1], "-t", options.image, "."],
        ["docker", "push", options.image],
        ["kubectl", "create", "-f", paths[0]],
        follow,
    ):
        print(f"  {shlex.join(words)}")


def _check(options: Options) -> str | None:
    """Refuse what cannot work; the name of the bucket."""
    check_name("--name", options.name)
    check_name("--image", options.image, IMAGE)
    for flag, value, form in (
        ("--namespace", options.namespace, WORD),
        ("--service-account", options.service_account, WORD),
        ("--base-image", options.base_image, BASE),
    ):
        if value is not None:
            check_name(flag, value, form)
    check_number("--max-restarts", options.max_restarts, minimum=0)
    check_number("--price-per-chip-hour", options.price_per_chip_hour, minimum=0, exclusive=True)
    return check_bucket(options.bucket)
