"""The container image of a launch: not root, versions pinned by the project's constraints."""

from __future__ import annotations

from launch import project

USER = 10001  # a number without a name on any host
PYTHON = "3.11"

_DOCKERFILE = """\
# Build it in a checkout of the project: docker build -f {dockerfile} -t {image} .
# {base} is a tag, which moves; to pin the very same layers, write its digest after it: {base}@sha256:...
FROM {base}

WORKDIR /app
COPY . /app
# As root, so that the program cannot change itself when it runs.
RUN pip install --no-cache-dir -c constraints/python{python}.txt '.[tpu]' \\
 && useradd --no-create-home --uid {user} podracer

USER {user}:{user}
ENV JAX_PLATFORMS=tpu PYTHONUNBUFFERED=1
ENTRYPOINT ["podracer"]
"""

_IGNORED = "# What never goes into the image: history, environments, runs, and whatever may hold a secret."


def files(image: str, folder: str | None, base: str | None = None) -> dict[str, str]:
    """The Dockerfile, and what it leaves out, by file name."""
    dockerfile = f"{folder}/Dockerfile" if folder else "Dockerfile"
    base = base or f"python:{PYTHON}-slim-bookworm"
    text = _DOCKERFILE.format(dockerfile=dockerfile, image=image, base=base, python=PYTHON, user=USER)
    ignored = [_IGNORED, *(f"**/{pattern}" for pattern in (*project.SKIPPED, *project.SECRET))]
    return {"Dockerfile": text, "Dockerfile.dockerignore": "\n".join(ignored) + "\n"}
