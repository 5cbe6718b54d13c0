"""Environments by name, and from a file of the user's own."""

import dataclasses
import re
import subprocess
import sys
import textwrap

import jax
import pytest

from podracer import envs, plugins
from podracer.envs.atari_protocol import CLASSIC_ATARI, Atari
from podracer.envs.envpool import GAMES
from podracer.errors import UserError

GOOD = """
    from podracer import envs

    class Mine(envs.Catch):
        pass

    def small(rows=4):
        return envs.Catch(rows=rows)

    ready = envs.Catch(rows=6)
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).lstrip())
        return path

    return write


@pytest.mark.parametrize("name", ["catch", "gridworld", "cartpole", "cartpole-masked", "memory-chain"])
def test_own_environments_by_name(name):
    assert envs.make(name).spec.name == name
    assert name in dict(envs.names())


def test_options_reach_the_environment():
    assert envs.make("catch", rows=7) == envs.Catch(rows=7)
    assert envs.make("cartpole-masked", max_steps=9) == envs.CartPole(9, mask_velocity=True)


@pytest.mark.parametrize("game", ["Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"])
def test_minatar_is_an_alias(game):
    pytest.importorskip("gymnax")
    assert envs.make(f"minatar/{game}") == envs.Gymnax(f"{game}-MinAtar")


def test_host_environments_by_name_and_their_options():
    pong = envs.make("atari/Pong", protocol="classic", sticky_actions=0.1, num_threads=2)
    assert pong.spec.name == "atari/Pong" and pong.spec.frame_skip == 4
    assert pong.atari == dataclasses.replace(CLASSIC_ATARI, sticky_actions=0.1) and pong.num_threads == 2
    assert envs.make("atari/Pong").atari == Atari()
    cartpole = envs.make("envpool/CartPole-v1", num_threads=1)
    assert cartpole == envs.Envpool("CartPole-v1", num_threads=1) and cartpole.spec.name == "envpool/CartPole-v1"
    assert envs.is_host(pong) and envs.is_host(cartpole) and not envs.is_host(envs.Catch())
    assert not envs.is_host(envs.Batch(envs.Catch()))
    assert {"atari/GAME", "envpool/TASK"} <= {name for name, _ in envs.names()}


def test_batch_sizes_are_set_by_the_run():
    assert envs.on_host(envs.make("atari/Pong"), 3).batch_size == 3
    assert envs.on_host(envs.Catch(), 5) == envs.on_host(envs.on_host(envs.Catch(), 2), 5)
    with pytest.raises(UserError, match="batch_size is no option of atari/Pong but a setting of the run"):
        envs.make("atari/Pong", batch_size=3)


def test_the_list_of_games_is_that_of_envpool():
    envpool = pytest.importorskip("envpool")
    known = set(envpool.list_all_envs())
    assert {f"{game}-v5" for game in GAMES} <= known
    rest = {task for task in known if task.endswith("-v5")} - {f"{game}-v5" for game in GAMES}
    assert not [task for task in rest if "repeat_action_probability" in envpool.make_spec(task).config._fields]


def test_a_host_environment_cannot_be_compiled():
    assert envs.jittable(envs.Catch()) == envs.Catch()
    with pytest.raises(UserError, match=r"atari/Pong runs on the host; use: podracer train sebulba --env atari/Pong"):
        envs.jittable(envs.make("atari/Pong"))


def test_every_name_has_one_line():
    listed = envs.names()
    assert len({name for name, _ in listed}) == len(listed)
    assert all(description and "\n" not in description for _, description in listed)
    assert dict(listed)["minatar/Breakout"] == dict(listed)["gymnax/Breakout-MinAtar"]
    assert {"gymnax/CartPole-v1", "minatar/Breakout", "brax/ant", "jumanji/Snake-v1", "pgx/chess"} <= {
        name for name, _ in listed
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cartpol", "unknown environment 'cartpol'. Did you mean 'cartpole'"),
        ("Catch", "Did you mean 'catch'"),
        ("brx/ant", "Did you mean 'brax/ant'"),
        ("minatar/breakot", "Did you mean"),
        ("atari/Pongg", "unknown environment 'atari/Pongg'. Did you mean 'atari/Pong'"),
        ("atari/breakout", "Did you mean 'atari/Breakout'"),
        ("atri/Pong", "Did you mean 'atari/Pong'"),
        ("envpool/Pong-v5", "envpool/Pong-v5 is an Atari game; write atari/Pong"),
        ("envpool/CartPol-v1", "Did you mean 'CartPole-v1'"),
        ("zzzzzz", "unknown environment 'zzzzzz'. List them"),
    ],
)
def test_unknown_names_suggest_a_known_one(name, message):
    with pytest.raises(UserError, match=re.escape(message)):
        envs.make(name)


def test_unknown_options_suggest_a_known_one():
    with pytest.raises(UserError, match=r"catch has no option 'row'. Did you mean 'rows'\? It has: rows, columns"):
        envs.make("catch", row=3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "atari/Pong",
            {"sticky_action": 0.1},
            r"atari/Pong has no option 'sticky_action'. Did you mean 'sticky_actions'\? It has: pro",
        ),
        ("atari/Pong", {"protocol": "clasic"}, "unknown protocol 'clasic'. Did you mean 'classic'"),
        ("atari/Pong", {"sticky_actions": "often"}, "sticky_actions is 'often'; expected a number"),
        ("atari/Pong", {"full_actions": 1}, "full_actions is 1; expected True or False"),
        ("atari/Pong", {"stack": 1.5}, "stack is 1.5; expected a whole number"),
        ("envpool/CartPole-v1", {"threads": 1}, "has no option 'threads'. It has: num_threads"),
    ],
)
def test_wrong_options_of_host_environments(name, options, message):
    with pytest.raises(UserError, match=message):
        envs.make(name, **options)


def test_a_class_a_function_and_an_instance_in_a_file(write):
    path = write(GOOD)
    assert envs.make(f"{path}:Mine", rows=5).rows == 5
    assert envs.make(f"{path}:small").rows == 4
    assert envs.make(f"{path}:small", rows=9).rows == 9
    assert envs.make(f"{path}:ready").rows == 6
    assert envs.make(f"{path}:Mine") == envs.make(f"{path}:Mine")
    envs.Batch(envs.make(f"{path}:Mine")).init(jax.random.split(jax.random.key(0), 2))


def test_a_relative_path_and_a_neighbour(write, monkeypatch):
    write("size = 8\n", "podracer_test_neighbour.py")
    path = write(
        "import podracer_test_neighbour\nfrom podracer import envs\nenv = envs.Catch(podracer_test_neighbour.size)\n"
    )
    monkeypatch.chdir(path.parent)
    before = list(sys.path)
    assert envs.make("mine.py:env").rows == 8
    assert sys.path == before


def test_a_changed_file_is_read_again(write):
    path = write("value = 1\n")
    assert plugins.load_object(f"{path}:value") == 1
    write("value = 100\n")
    assert plugins.load_object(f"{path}:value") == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = 1 / 0\n", "mine.py:2: ZeroDivisionError: division by zero"),
        ("def f(:\n", "mine.py:1: SyntaxError: invalid syntax"),
        ("x = 1\nimport no_such_module\n", "mine.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("import json\n\n\njson.loads('{')\n", "mine.py:4: JSONDecodeError: Expecting property name"),
        ("class Env:\n    def __init__(self):\n        raise KeyError('k')\n", "mine.py:3: KeyError: 'k'"),
        ("def Env(size):\n    return size\n", "mine.py:Env needs size; expected --env.size VALUE."),
        (
            "from podracer import envs\ndef Env():\n    return envs.make('ctch')\n",
            "mine.py:3: unknown environment 'ctch'",
        ),
        ("class Env:\n    spec = 1\n    def start(self, seeds): ...\n", "gives a Env without batch_size"),
        (
            "class Env:\n    observation_space = action_space = spec = 1\n",
            "mine.py:Env is an environment of Gymnasium; expected one of podracer. Register it",
        ),
        ("Enw = 3\n", "unknown object 'Env'. Did you mean 'Enw'"),
        ("Env = 3\n", "mine.py:Env gives a int without spec and reset and step"),
        ("class Env:\n    spec = 1\n    def reset(self, key): ...\n", "gives a Env without step"),
        (
            "class Env:\n    spec = 1\n    def reset(self, key): ...\n    def step(self, state, action, key): ...\n",
            "mine.py:Env: spec is a int; expected a podracer.envs.api.Spec",
        ),
        (
            "class Env:\n    @property\n    def spec(self):\n        return self.nothing\n"
            "    def reset(self, key): ...\n    def step(self, state, action, key): ...\n",
            "mine.py:4: AttributeError: 'Env' object has no attribute 'nothing'",
        ),
    ],
)
def test_mistakes_in_a_file_name_its_line(write, text, message):
    path = write(text)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        envs.make(f"{path}:Env")
    assert "\n" not in str(caught.value)


STRICT = """
    from podracer import envs

    class Env(envs.Catch):
        def __init__(self, size: int, fast=False):
            if size < 1:
                raise ValueError("size must be positive")
            super().__init__(rows=size)

    def loose(**options):
        return envs.Catch(**options)

    def none():
        return envs.Catch()
"""


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Env", {"siz": 3}, "mine.py:Env has no option 'siz'. Did you mean 'size'? It has: size, fast."),
        ("Env", {"fast": True}, "mine.py:Env needs size; expected --env.size VALUE."),
        ("Env", {"size": -1}, "mine.py:6: ValueError: size must be positive. It was given size = -1: change --env.*."),
        ("Env", {"size": "x"}, "mine.py:5: TypeError: '<' not supported between instances of 'str' and 'int'."),
        ("loose", {"row": 3}, "Catch.__init__() got an unexpected keyword argument 'row'. It was given row = 3"),
        ("none", {"size": 3}, "mine.py:none has no option 'size'. It has none."),
    ],
)
def test_wrong_options_of_a_file_name_them(write, name, options, message):
    path = write(STRICT)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        envs.make(f"{path}:{name}", **options)
    assert "\n" not in str(caught.value)


def test_wrong_references(write):
    path = write(GOOD)
    with pytest.raises(UserError, match=r"there is no file .*min.py. Did you mean 'mine.py'"):
        envs.make(f"{path.parent}/min.py:Mine")
    with pytest.raises(UserError, match=r"does not name an object in a file; expected path.py:Object"):
        envs.make(f"{path}")
    with pytest.raises(UserError, match="is an environment already and takes no options"):
        envs.make(f"{path}:ready", rows=3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.py:B", True), ("/x/a.py:B", True), ("a.py", True), ("catch", False), ("pgx/chess", False), ("a.pyx", False)],
)
def test_references_are_recognised(name, expected):
    assert plugins.is_reference(name) is expected


def test_importing_is_light():
    code = """
import sys
import podracer.envs
assert podracer.envs.names()
libraries = {"gymnax", "brax", "jumanji", "pgx", "navix", "xminigrid", "craftax", "gymnasium", "envpool", "matplotlib"}
loaded = libraries & set(sys.modules)
assert not loaded, loaded
from jax._src import xla_bridge
assert not xla_bridge._backends, "a device was queried"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
