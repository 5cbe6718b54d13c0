"""What a run on Sebulba says: rows of metrics, and in words who waits for whom."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from podracer import hosts
from podracer.envs.atari_scores import human_normalised
from podracer.metrics import EpisodeSums, ReturnWindow
from sebulba.actor import Episode
from sebulba.loop import Sebulba
from sebulba.update import Update

ACTING = ("environment", "inference", "transfer")  # what an actor thread does; it waits in "params" and "queue_put"


class Report:
    """Collects updates and makes rows of them.

    Args:
      loop: the run's loop.
      window: of the returns so far.
      steps: decisions before this loop began.
      updates: learner steps before this loop began.
    """

    def __init__(self, loop: Sebulba, window: ReturnWindow, steps: int = 0, updates: int = 0):
        self._loop, self.window = loop, window
        self._steps, self._updates, self._first = steps, updates, loop.learner.updates
        self._collected: list[Update] = []
        self._ended: list[list[float]] = []  # [updates][6], not yet in the window
        self._lags: collections.Counter[int] = collections.Counter()
        self._acted = self._acted_before = self._dropped = 0

    def steps_after(self, update: int) -> int:
        """Decisions learned from when that update was done."""
        return self._steps + (update - self._first) * self._loop.steps_per_update

    def updates_after(self, update: int) -> int:
        """Learner steps made when that update was done."""
        return self._updates + (update - self._first) * self._loop.learner_splits

    def add(self, update: Update) -> None:
        """Take one update."""
        self._collected.append(update)
        self._ended.append([float(leaf[0]) for leaf in _sums(update.episodes)])

    def collect(self) -> None:
        """Add up what all hosts have seen since the last time, on the first one. All hosts call it after an update."""
        last = self._collected[-1] if self._collected else None
        own = {"ended": self._ended, "lags": [lag for update in self._collected for lag in update.lags]}
        own |= {"acted": last.acted if last else 0, "dropped": last.dropped if last else 0}
        self._ended, parts = [], hosts.to_first("report", own)
        for of_hosts in zip(*(part["ended"] for part in parts)):
            count, returns, lengths, smallest, largest, cut = zip(*of_hosts)
            sums = [sum(count), sum(returns), sum(lengths), min(smallest), max(largest), sum(cut)]
            arrays: list[Any] = [np.asarray([value]) for value in sums]
            self.window.add(EpisodeSums(*arrays))
        if last is not None:
            self._lags = collections.Counter(lag for part in parts for lag in part["lags"])
            self._acted, self._dropped = (sum(part[name] for part in parts) for name in ("acted", "dropped"))

    def row(self, lap_s: float, train_s: float) -> dict[str, Any]:
        """The updates since the row before, which took `lap_s` seconds, as one row: of all hosts, on the first one.

        What threads waited for is this host's own.
        """
        self.collect()
        updates, self._collected = self._collected, []
        last, skip = updates[-1], self._loop.env.spec.frame_skip
        steps = self.steps_after(last.number)
        learned = len(updates) * self._loop.steps_per_update / lap_s
        acted = (self._acted - self._acted_before) / lap_s
        self._acted_before = self._acted
        row = {"steps": steps, "frames": steps * skip, "updates": self.updates_after(last.number)}
        row |= {"train_s": round(train_s, 4), "steps_per_s": learned, "frames_per_s": learned * skip}
        row["num_cores"] = self._loop.topology.num_cores
        row |= {"acting_steps_per_s": acted, "acting_frames_per_s": acted * skip}
        row |= self.window.row()
        normalised = human_normalised(self._loop.env.spec.name, row.get("return_mean", float("nan")))
        if normalised is not None and "return_mean" in row:
            row["return_human_normalised"] = normalised
        for name in last.metrics:
            total = name == "nonfinite_updates"
            row[name] = float((np.sum if total else np.mean)([update.metrics[name] for update in updates]))
        row |= {f"wait_{name}_s": float(np.mean([update.waits[name] for update in updates])) for name in last.waits}
        row |= {"lag_mean": float(np.mean(list(self._lags.elements()))), "dropped_trajectories": self._dropped}
        return row | {f"lag_{lag}": count for lag, count in sorted(self._lags.items())}


def starvation(row: dict[str, Any]) -> str:
    """Who waits for whom, in words, from the waits of a row."""
    seconds = {name.removeprefix("wait_").removesuffix("_s"): row[name] for name in row if name.startswith("wait_")}
    learner = _shares(seconds, ("queue_get", "learner_step", "publish"))
    actors = _shares(seconds, (*ACTING, "params", "queue_put"))
    starved, idle = learner["queue_get"], actors["params"] + actors["queue_put"]
    busiest = max(ACTING, key=lambda name: actors[name])
    parts = ", ".join(f"{name} {100 * actors[name]:.0f} %" for name in ACTING)
    text = f"the learner waits for trajectories {100 * starved:.0f} % of its time; actor threads: {parts}, "
    text += f"waiting for the learner {100 * idle:.0f} %. "
    if starved > 0.3 and starved > idle:
        hints = {
            "environment": "environments are the limit: more actor threads or CPU cores",
            "inference": "inference is the limit: larger --batch-size or more --actor-cores",
            "transfer": "transfers are the limit: larger --batch-size",
        }
        return text + f"The learner starves; {hints[busiest]}."
    if idle > 0.3:
        return text + "The actors starve; the learner is the limit: more learner cores (fewer --actor-cores)."
    return text + "Both are busy."


def _shares(seconds: dict[str, float], names: tuple[str, ...]) -> dict[str, float]:
    total = sum(seconds.get(name, 0.0) for name in names) or 1.0
    return {name: seconds.get(name, 0.0) / total for name in names}


def _sums(episodes: list[Episode]) -> EpisodeSums:
    """The games that ended in one update, as Anakin reports them: [1] each."""
    scores = np.asarray([episode.score for episode in episodes], np.float64)
    count, lengths = len(episodes), sum(episode.length for episode in episodes)
    smallest, largest = scores.min(initial=np.inf), scores.max(initial=-np.inf)
    sums: list[Any] = [np.asarray([value]) for value in (count, scores.sum(), lengths, smallest, largest, 0.0)]
    return EpisodeSums(*sums)
