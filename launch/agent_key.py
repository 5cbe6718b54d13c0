"""Whether gcloud can reach several hosts of a queued resource at once: an ssh agent with keys must have gcloud's, too.

gcloud itself says so when the slice is there and costs money.
"""

from __future__ import annotations

import pathlib
import subprocess

from podracer.errors import UserError

KEY = "~/.ssh/google_compute_engine"  # gcloud's own, made where there is none


def check() -> None:
    """Refuse an agent that holds other keys only; without an agent, or with an empty one, gcloud goes on by itself.

    Raises:
      UserError: says what to type.
    """
    held = _said("ssh-add", "-l")
    if held is None:
        return
    path = pathlib.Path(KEY).expanduser()
    fingerprint = (_said("ssh-keygen", "-lf", str(path)) or "").split()[1:2]
    if fingerprint and fingerprint[0] in held:
        return
    make = "" if path.exists() else f"ssh-keygen -t rsa -N '' -f {KEY} && "
    raise UserError(
        f"the ssh agent holds keys, but not {KEY}, with which gcloud reaches the hosts of a slice. "
        f"First: {make}ssh-add {KEY}"
    )


def _said(*words: str) -> str | None:
    """What a program says on its standard output; None where there is none, or it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
