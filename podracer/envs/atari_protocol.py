"""How Atari 2600 games are played: one record for every emulator, and the two protocols that papers use."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from podracer.errors import UserError, check_number, closest, unknown


@dataclasses.dataclass(frozen=True)
class Atari:
    """How the Atari games are played; the defaults are the protocol of Machado et al. 2018."""

    sticky_actions: float = 0.25
    """Probability that the emulator repeats the previous action."""
    full_actions: bool = True
    """All 18 actions instead of those that do something in the game."""
    life_loss_ends: bool = False
    """A lost life ends the episode for the learner; the score goes on."""
    clip_rewards: bool = True
    """Learn from the sign of the reward; the score is not clipped."""
    max_no_ops: int = 1
    """Up to this many random no-ops at the start of a game."""
    max_episode_frames: int = 108_000
    """Emulator frames after which a game is cut."""
    frame_skip: int = 4
    """Frames per action; the last two are merged by their maximum."""
    stack: int = 4
    """Frames per observation, one plane each."""
    image_size: int = 84
    """Height and width of a frame after scaling; with 42, networks are several times cheaper."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, number = getattr(self, field.name), not isinstance(field.default, bool)
            if isinstance(value, bool) == number or not isinstance(value, numbers.Real):
                expected = "a number" if number else "True or False"
                raise UserError(f"{field.name} is {value!r}; expected {expected}. Change {field.name}.")
        check_number("sticky_actions", self.sticky_actions, minimum=0, maximum=1)
        for name in ("max_no_ops", "frame_skip", "stack", "image_size", "max_episode_frames"):
            check_number(name, getattr(self, name), minimum=1, whole=True)
        if self.max_episode_frames % self.frame_skip:
            raise UserError(
                f"max_episode_frames is {self.max_episode_frames}; expected a multiple of frame_skip = "
                f"{self.frame_skip}. Change one of them."
            )

    def describe(self) -> str:
        """The protocol in words."""
        actions = "all 18" if self.full_actions else "the minimal"
        ends = "a lost life ends an episode for the learner" if self.life_loss_ends else "lost lives are no ends"
        rewards = "clipped" if self.clip_rewards else "as they are"
        return (
            f"sticky actions {self.sticky_actions:g}, {actions} actions, {ends}, rewards {rewards}, up to "
            f"{self.max_no_ops} no-ops at the start, games cut after {self.max_episode_frames:,} frames "
            f"({self.max_episode_frames // self.frame_skip:,} steps of {self.frame_skip})"
        )


# The protocol of Mnih et al. 2015 and most papers after it.
CLASSIC_ATARI = Atari(sticky_actions=0.0, full_actions=False, life_loss_ends=True, clip_rewards=True, max_no_ops=30)

PROTOCOLS = {"machado": Atari(), "classic": CLASSIC_ATARI}


def options(owner: str, given: dict[str, Any], others: tuple[str, ...] = ()) -> Atari:
    """How to play, from keyword arguments: `protocol` gives the defaults of the fields of `Atari`.

    Args:
      owner: the environment's name, for errors.
      given: `protocol` and fields of `Atari`.
      others: options that the environment has besides, for errors.

    Raises:
      UserError: there is no such protocol or field.
    """
    changes = dict(given)
    protocol = changes.pop("protocol", "machado")
    if protocol not in PROTOCOLS:
        raise unknown("protocol", str(protocol), PROTOCOLS, f"Expected {' or '.join(PROTOCOLS)}.")
    known = ["protocol", *(field.name for field in dataclasses.fields(Atari)), *others]
    for option in changes:
        if option not in known:
            raise UserError(f"{owner} has no option '{option}'.{closest(option, known)} It has: {', '.join(known)}.")
    return dataclasses.replace(PROTOCOLS[protocol], **changes)
