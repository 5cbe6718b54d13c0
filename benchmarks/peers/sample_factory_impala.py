"""Speed of Sample Factory's APPO on an Atari game of envpool, driven over standard input (see README.md beside this).

Runs in Sample Factory's own virtual environment and imports nothing of podracer. What is timed is its own runner with
V-trace, one epoch and one minibatch: as much learning per step as IMPALA. It goes on by itself between two blocks:
whoever drives it stops its processes meanwhile (SIGSTOP).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version

import gymnasium
import numpy as np

PACKAGES = ("sample-factory", "torch", "envpool", "gymnasium", "numpy")
THREADS = "SAMPLE_FACTORY_LEARNER_THREADS"  # for the processes that it starts
NETWORKS = {"nature": ("convnet_atari", 512), "impala_shallow": ("convnet_impala", 256)}
NEVER_S = 10**9


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="atari/Pong")
    parser.add_argument("--network", choices=tuple(NETWORKS), default="nature")
    parser.add_argument("--batch", type=int, default=32, help="environments per worker")
    parser.add_argument("--unroll", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="workers, each with one envpool")
    parser.add_argument("--torch-threads", type=int, default=2, help="threads of torch in the learner")
    parser.add_argument("--mode", choices=("async", "serial"), default="async", help="its processes, or all in one")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a block, which is whole updates")
    return parser.parse_args()


class Game(gymnasium.Env):
    """A batch of one game, with the protocol that podracer plays by default."""

    is_multiagent = True

    def __init__(self, game: str, num_envs: int, seed: int):
        import envpool

        self._pool = envpool.make(
            f"{game.removeprefix('atari/')}-v5",
            env_type="gymnasium",
            num_envs=num_envs,
            seed=seed,
            repeat_action_probability=0.25,
            full_action_space=True,
            episodic_life=False,
            reward_clip=True,
            noop_max=1,
            max_episode_steps=27000,
        )
        self.num_agents = num_envs
        self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space

    def reset(self, **kwargs):
        return self._pool.reset()[0], {}

    def step(self, actions):
        # envpool resets a game in the step after its end. Sample Factory's own example resets it at once, by a step of
        # the emulator more.
        observation, reward, terminated, truncated, _ = self._pool.step(np.asarray(actions, np.int32).reshape(-1))
        return observation, reward, terminated, truncated, {}

    def render(self):
        return None

    def close(self):
        self._pool = None  # envpool's own close does not work with gymnasium 0.29


def make_game(name, cfg, env_config, render_mode=None):
    """What Sample Factory calls in each worker."""
    number = 0 if env_config is None else env_config.env_id
    return Game(name, int(cfg.env_agents), 1 + number * int(cfg.env_agents))


def prepare() -> None:
    """In each of its processes: the learner gets as many threads as were asked for, and writes no summaries.

    Sample Factory gives torch one thread everywhere but in serial mode. Its summaries fail with V-trace
    (`'AttrDict' object has no attribute 'advantages'`).
    """
    from sample_factory.algo.learning import learner, learner_worker
    from sample_factory.algo.utils.torch_utils import init_torch_runtime

    learner_worker.init_torch_runtime = lambda cfg: init_torch_runtime(cfg, int(os.environ[THREADS]))
    learner.Learner._should_save_summaries = lambda self: False


def configure(args: argparse.Namespace):
    """Sample Factory's configuration for the same work as podracer's IMPALA."""
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env

    register_env(args.env, make_game)
    encoder, dense = NETWORKS[args.network]
    settings = {
        **{"env": args.env, "algo": "APPO", "device": "cpu", "experiment": "speed", "train_dir": tempfile.mkdtemp()},
        **{"serial_mode": args.mode == "serial", "async_rl": args.mode == "async", "batched_sampling": True},
        **{"num_workers": args.threads, "num_envs_per_worker": 1, "worker_num_splits": 1},
        **{"rollout": args.unroll, "recurrence": args.unroll, "with_vtrace": True, "use_rnn": False},
        **{"batch_size": args.threads * args.batch * args.unroll, "num_batches_per_epoch": 1, "num_epochs": 1},
        **{"encoder_conv_architecture": encoder, "encoder_conv_mlp_layers": dense, "nonlinearity": "relu"},
        **{"normalize_input": False, "normalize_returns": False, "obs_scale": 255.0, "learning_rate": 6e-4},
        **{"max_grad_norm": 40.0, "kl_loss_coeff": 0.0, "gamma": 0.99, "env_frameskip": 4},
        **{"decorrelate_envs_on_one_worker": False, "decorrelate_experience_max_seconds": 0},
        **{"train_for_env_steps": NEVER_S, "train_for_seconds": NEVER_S, "heartbeat_reporting_interval": NEVER_S},
        **{"save_every_sec": NEVER_S, "save_best_every_sec": NEVER_S, "experiment_summaries_interval": NEVER_S},
    }
    argv = [f"--{name}={value}" for name, value in settings.items()]
    parser, _ = parse_sf_args(argv)
    parser.add_argument("--env_agents", type=int, default=args.batch)
    return parse_full_cfg(parser, argv)


def cpu_seconds() -> float:
    """Of this process and all that it started."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def observer(args: argparse.Namespace, channel, began: float):
    """Counts training steps in the main process, and speaks the protocol between blocks."""
    from sample_factory.algo.runners.runner import AlgoObserver

    steps = args.threads * args.batch * args.unroll

    class Blocks(AlgoObserver):
        start, cpu, updates, seen = 0.0, 0.0, 0, 0

        def on_training_step(self, runner, training_iteration_since_resume):
            self.seen += 1
            self.updates += 1
            if self.seen < 3:  # the first ones start threads and fill queues
                return
            elapsed = time.perf_counter() - self.start
            if self.seen == 3:
                versions = {name: version(name) for name in PACKAGES}
                config = {**vars(args), "peer": "sample-factory", "versions": versions}
                self.say({"ready": True, "compile_s": round(time.perf_counter() - began, 3), "config": config})
            elif elapsed >= args.seconds:
                done = self.updates * steps
                result = {"steps": done, "seconds": elapsed, "steps_per_s": done / elapsed}
                self.say({**result, "cpu_seconds": cpu_seconds() - self.cpu, "updates": self.updates})

        def say(self, message):
            print(json.dumps(message), file=channel)
            if not sys.stdin.readline().strip().startswith("go"):
                leave()
            self.start, self.cpu, self.updates = time.perf_counter(), cpu_seconds(), 0

    return Blocks()


def leave() -> None:
    """End all processes at once; there is nothing to save."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


def take_stdout():
    """Keep standard output for the protocol alone: whatever libraries print goes to standard error."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def main() -> None:
    args = parse_args()
    channel = take_stdout()
    os.environ[THREADS] = str(args.torch_threads)
    import torch
    from sample_factory.train import make_runner

    prepare()
    torch.set_num_threads(args.torch_threads)
    began = time.perf_counter()
    _, runner = make_runner(configure(args))
    runner.register_observer(observer(args, channel, began))
    status = runner.init()
    if status == 0:
        status = runner.run()
    raise SystemExit(f"Sample Factory stopped by itself, status {status}")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    prepare()
