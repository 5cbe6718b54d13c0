"""Where a run's rows go: to a terminal, to the files of its directory, to who asks for its newest metrics."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

from podracer import config, hosts
from podracer.errors import UserError
from podracer.prometheus import Prometheus
from podracer.scoring import ScoredRun
from podracer.sinks import (
    Alarms,
    JsonLines,
    Sink,
    TensorBoard,
    Terminal,
    WeightsAndBiases,
    drop_rows_after,
    import_wandb,
)


def check_sinks(directory: pathlib.Path | None, tensorboard: bool, wandb: bool) -> None:
    """Refuse sinks that cannot work, before anything is written.

    Raises:
      UserError: wandb is not installed, or there is no directory for the files.
    """
    if directory is None and (tensorboard or wandb):
        name = "tensorboard" if tensorboard else "wandb"
        raise UserError(f"{name} is on, but there is no run directory for its files. Give a run_dir.")
    if wandb:
        import_wandb()


@contextlib.contextmanager
def open_sinks(
    run: ScoredRun, given: Sequence[Sink] | None, total_steps: int, members: int = 1
) -> Iterator[tuple[list[Sink], Callable[[str], None]]]:
    """`(sinks, note)`: the files of the run directory beside the `given` sinks, or a terminal where None are given.

    `note(text)` says a line in the terminal. All sinks are closed at the end. Of several hosts only the first has any.
    """
    if not hosts.is_first():
        yield [], lambda text: None
        return
    terminal = None
    if given is None:
        terminal = Terminal(total_steps, f"{run.agent.name} on {run.env_name}", members)
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        own: list[Sink] = [terminal, Alarms(run.agent.alarms, terminal.note)] if terminal else []
        for sink in (*(given or ()), *own, *_default_sinks(run)):
            stack.callback(sink.close)
            sinks.append(sink)
        yield sinks, terminal.note if terminal else lambda text: None


def _default_sinks(run: ScoredRun) -> Iterator[Sink]:
    """The files of a run directory, and what else was asked for, for a run that goes on after `run.steps`."""
    if run.settings.metrics_port is not None:
        yield Prometheus(run.settings.metrics_port, {"agent": run.agent.name, "env": run.env_name})
    if run.directory is None:
        return
    # A run that was killed has rows from after its last checkpoint: they will be written again.
    drop_rows_after(run.directory / "metrics.jsonl", run.steps)
    yield JsonLines(run.directory / "metrics.jsonl")
    if run.settings.tensorboard:
        yield TensorBoard(run.directory / "tensorboard", run.steps)
    if run.settings.wandb:
        yield WeightsAndBiases(run.directory, config.read(run.directory))
