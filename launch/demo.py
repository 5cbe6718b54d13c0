"""`podracer demo`: Anakin learns Catch, then CartPole, and draws what came of it."""

from __future__ import annotations

import dataclasses
import pathlib
import time

from launch.machine import Machine
from launch.parse import parse
from podracer.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options(Machine):
    out: str = "runs/demo"
    """Folder for the runs and pictures; a number is added where it exists."""


# Environment -> mean return at which it counts as solved.
SOLVED = {"catch": 0.95, "cartpole": 470.0}


def main(arguments: list[str]) -> None:
    """Train with the presets, evaluate, draw; exit status 1 where a task was not solved."""
    options = parse(Options, arguments, "podracer demo", "Train on Catch and CartPole, and draw what came of it.")
    cores = options.start()
    folder = _new_folder(pathlib.Path(options.out))
    started = time.perf_counter()

    import anakin
    from podracer import config, envs, plot, presets, render

    pictures, solved = [], True
    for name, bar in SOLVED.items():
        found = presets.find(name, "ppo")
        assert found is not None
        preset = found[1]
        env, maker = envs.make(name), config.agent_maker("ppo")
        agent_config = dataclasses.replace(config.default_of(maker, "config"), **preset.config)
        agent = config.make_agent(env.spec, maker, agent_config)
        print(f"\n== PPO on {name}")
        run = anakin.train(agent, env, cores=cores, run_dir=folder / name, **preset.settings)
        result = run.evaluate(episodes=128, params=run.best_params).summary()
        reached = result["return_mean"] >= bar
        solved &= reached
        print(
            f"{name}: mean return {result['return_mean']:.2f} over {result['episodes']} episodes "
            f"({'solved' if reached else 'NOT solved'}: {bar:g} needed)"
        )
        gif, png = folder / f"{name}.gif", folder / f"{name}.png"
        frames = render.play(agent, env, run.best_params, episodes=5 if name == "catch" else 1, max_steps=300)
        render.write(gif, frames, 8 if name == "catch" else 50)
        plot.plot([folder / name], png, title=f"PPO on {name}")
        pictures += [png, gif]
    print(f"\ndone in {time.perf_counter() - started:.0f} s; pictures:")
    for picture in pictures:
        print(f"  {picture}")
    if not solved:
        raise SystemExit(1)


def _new_folder(wanted: pathlib.Path) -> pathlib.Path:
    for number in range(1, 1000):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if not folder.exists():
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise UserError(f"--out {folder} cannot be made: {error.strerror}. Choose another --out.") from None
            return folder
    raise UserError(f"--out {wanted} and 998 numbered ones exist. Choose another --out.")
