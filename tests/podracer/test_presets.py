"""Presets: every one can be made, and the one for the very environment wins."""

from __future__ import annotations

import dataclasses

import pytest

import anakin
import muzero  # noqa: F401  # its agents get their names
import sebulba
from podracer import config, envs, networks, presets
from podracer.presets import PRESETS, Preset


def settings_of(architecture):
    return {field.name for field in dataclasses.fields(architecture.Settings)}


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_can_be_made(name):
    """Its fields are fields of the agent's config, of the network and of an architecture that has all of them."""
    preset = PRESETS[name]
    maker = config.agent_maker(preset.agent)
    dataclasses.replace(config.default_of(maker, "config"), **preset.config)
    if preset.network is not None:
        config.network_recipe(preset.network, preset.network_config)
    host = preset.env.partition("/")[0] in ("atari", "ale", "envpool", "gymnasium")
    assert set(preset.settings) <= settings_of(sebulba if host else anakin)
    assert preset.result


def test_atari_has_published_presets():
    """As many decisions as 200 M frames, annealed to their end, on the residual network."""
    spec = envs.make("atari/Breakout").spec
    for agent in ("ppo", "impala"):
        name, preset = presets.find("atari/Breakout", agent)
        assert name == f"atari-{agent}" and "not run to the end here" in preset.result
        assert preset.settings["total_steps"] * spec.frame_skip == 200_000_000
        assert preset.config["anneal_steps"] == preset.settings["total_steps"]
        assert config.network_recipe(preset.network) == networks.impala_resnet()


def test_a_preset_for_the_very_environment_comes_before_one_for_its_family(monkeypatch):
    monkeypatch.setitem(PRESETS, "mine", Preset("atari/Pong", "ppo"))
    assert presets.find("atari/Pong", "ppo") == ("mine", PRESETS["mine"])
    assert presets.find("atari/Breakout", "ppo") == ("atari-ppo", PRESETS["atari-ppo"])
    assert presets.find("atari/Breakout", "pqn") is None
