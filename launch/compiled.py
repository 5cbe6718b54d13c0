"""Compiled programs, kept between commands in the user's cache folder: the second start is fast."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from podracer import hosts

AT_LEAST_S = 0.5  # what took less to compile is compiled again


def use_compilation_cache() -> None:
    """Keep compiled programs, in JAX's own folder where one is set. To be called once JAX has started."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore  # JAX adds its flags to the config as it runs
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(base, "podracer", "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", AT_LEAST_S)
    if hosts.index() > 0 and jax.default_backend() == "cpu":
        _write_here_too()


def _write_here_too() -> None:
    """Let this host, which is not the first, keep its programs as well.

    JAX has only the first host write them, for all. On CPUs that is of no use to the others: what identifies a program
    has their own devices in it, so that they would compile everything at each start. Nothing of this has a public name;
    where it is not as expected, they do.
    """
    from jax._src import compilation_cache, compiler

    write, put = getattr(compiler, "_cache_write", None), getattr(compilation_cache, "put_executable_and_time", None)
    if write is None or put is None or getattr(write, "is_ours", False):
        return

    def write_here_too(
        key: str, seconds: float, name: str, backend: Any, executable: Any, host_callbacks: Any, *rest: Any
    ) -> None:
        import jax

        write(key, seconds, name, backend, executable, host_callbacks, *rest)  # nothing but a message in a log
        least = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore
        if not host_callbacks and seconds >= least:
            with contextlib.suppress(Exception):  # a full disk, another JAX: it only costs time
                put(key, name, executable, backend, int(seconds))

    write_here_too.is_ours = True  # type: ignore[attr-defined]
    compiler._cache_write = write_here_too
