"""`podracer bench`: the numbers beside the picture, and one line for every mistake."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest

from launch import figures, points, scaling, sweep, turns, worker
from podracer import mesh
from podracer.errors import UserError
from podracer.facts import PACKAGES
from sebulba import measure
from sebulba.lag import Lag
from sebulba.loop import Sebulba
from sebulba.topology import split
from tests.launch.bench import bench
from tests.sebulba.scripted import OPEN, Scripted

TINY = ["--seconds", "0.05", "--rounds", "3", "--unroll-length", "4", "--updates-per-call", "2", "--platform", "cpu"]


EIGEN = "--xla_cpu_multi_thread_eigen=false"


def read(out):
    """`(rows of the table, facts)` beside a picture."""
    assert out.read_bytes().startswith(b"\x89PNG")
    with open(out.with_suffix(".csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads(out.with_suffix(".json").read_text())


def spreads_are_in_order(rows, *names):
    for row in rows:
        for name in names:
            low, median, high = (float(row[f"{name}_{which}"]) for which in ("low", "median", "high"))
            assert low <= median <= high


@pytest.mark.slow
def test_virtual_cores_are_measured_against_the_best_single_core(tmp_path, capsys, monkeypatch):
    """So many environments in total on 2 cores, and a single core with the half of them for comparison."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # the tests' own process has begun with several cores
    out = tmp_path / "figure.png"
    command = ["scaling", "--agent", "a2c", "--cores", "2", "--batch-size", "8"]
    assert bench(*command, *TINY, "--out", out) == 0
    assert capsys.readouterr().out == f"{out}, {out.with_suffix('.csv')}, {out.with_suffix('.json')}\n"
    rows, facts = read(out)
    assert [(row["cores"], row["environments"], row["baseline"]) for row in rows] == [
        ("2", "8", "False"),
        ("1", "4", "True"),
    ]
    assert {row["kind"] for row in rows} == {"virtual"} and {row["rounds"] for row in rows} == {"3"}
    spreads_are_in_order(rows, "steps_per_s", "frames_per_s", "cpu_us_per_step", "overhead")
    assert float(rows[1]["overhead_median"]) == 0.0  # the best against itself
    assert set(PACKAGES) < set(facts["versions"]) and facts["topology"]["cores"] == [2]
    # Of each point its own: a single core has all threads of the machine, if it has several.
    alone = facts["topology"]["physical_cores"] == 1
    assert list(facts["flags"]) == list(facts["samples"]) and len(facts["flags"]) == 2
    assert [EIGEN in flags.get("XLA_FLAGS", "") for flags in facts["flags"].values()] == [True, alone]
    assert [len(blocks) for blocks in facts["samples"].values()] == [3, 3]
    assert all("load" in block for blocks in facts["samples"].values() for block in blocks)


@pytest.mark.slow
def test_pinned_processes_train_together_each_with_environments_of_its_own(tmp_path, monkeypatch):
    """Weak scaling: two processes do twice the work, in as many updates."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    out = tmp_path / "figure.png"
    pinned = ["--pinned", "--cores", "1,2" if mesh.physical_cores() > 1 else "1"]
    assert bench("scaling", "--agent", "a2c", "--batch-size", "4", *pinned, *TINY, "--out", out) == 0
    rows, facts = read(out)
    assert [(row["cores"], row["hosts"], row["environments"]) for row in rows][:2] == [("1", "1", "4"), ("2", "2", "8")]
    spreads_are_in_order(rows, "steps_per_s", "efficiency")
    assert float(rows[0]["efficiency_median"]) == 1 and float(rows[1]["efficiency_median"]) > 0
    assert (facts["num_cores"], facts["steps_per_s"]) == (1, float(rows[0]["steps_per_s_median"]))
    assert round(facts["update_s"] * facts["steps_per_s"]) == 4 * 4  # environments, decisions
    assert all(EIGEN in flags["XLA_FLAGS"] for flags in facts["flags"].values())
    assert facts["kind"] == "pinned" and len(facts["topology"]["cpus"]) >= 2
    again = scaling.draw([facts, scaling.read(out.with_suffix(".json"))])  # a measurement beside another one
    assert len(again.axes) == 2


@pytest.mark.slow
def test_a_sweep_of_sebulba_has_the_environments_alone_beside_it(tmp_path):
    """A row for every batch size and unroll length, one per batch size for the environments alone."""
    out = tmp_path / "figure.png"
    axes = ["--axis", "batch-size", "--values", "8", "--lines", "unroll-length=3", "--network", "mlp"]
    command = ["sweep", "--architecture", "sebulba", "--env", "envpool/CartPole-v1", "--agent", "impala", *axes]
    assert bench(*command, "--cores", 2, *TINY, "--out", out) == 0
    rows, facts = read(out)
    assert [(row["what"], row["unroll_length"], row["batch_size"]) for row in rows] == [
        ("training", "3", "8"),
        ("environments alone", "", "8"),
    ]
    spreads_are_in_order(rows, "steps_per_s", "cpu_us_per_step")
    for row in rows:
        assert row["frames_per_s_median"] == row["steps_per_s_median"]  # CartPole skips no frames
    assert facts["recipe"]["network"] == "mlp" and facts["local_devices"] == 2
    assert facts["steps_per_s"] == float(rows[0]["steps_per_s_median"]) and facts["num_cores"] == 2
    assert round(facts["update_s"] * facts["steps_per_s"]) == 2 * 8 * 3  # threads, environments, decisions
    assert facts["params_bytes"] > 0


@pytest.mark.parametrize(
    "line, says",
    [
        ("scalling", "unknown figure 'scalling'. Did you mean 'scaling'?"),
        ("scaling --agent impal", "unknown agent 'impal'. Did you mean 'impala'?"),
        ("scaling --network natur", "unknown network 'natur'. Did you mean 'nature'?"),
        ("scaling --agent.epochs", "--agent.epochs has no value"),
        ("scaling --architecture anakim", "anakim"),
        ("scaling --cores 1,x", "--cores is '1,x'; expected whole numbers >= 1"),
        ("scaling --cores 0", "--cores is '0'"),
        ("scaling --hosts 1,", "--hosts is '1,'"),
        ("scaling --batch-size 0", "--batch-size is 0"),
        ("scaling --actor-fraction 2", "--actor-fraction is 2"),
        ("scaling --pinned --cores 1,4096", "--pinned with --cores 1,4096, but there are"),
        ("scaling --pinned --cores 1 --hosts 2", "--hosts and --pinned: every pinned core is a process already"),
        ("scaling --pinned --cores 1 --platform tpu", "--pinned is for CPUs; the platform is tpu"),
        ("scaling --also nothing.json", "--also has 'nothing.json'; expected a .json that `podracer bench scaling`"),
        ("scaling --seconds 0", "--seconds is 0"),
        ("scaling --rounds 0", "--rounds is 0"),
        ("scaling --out x.gif", "--out is 'x.gif'"),
        ("scaling --out nowhere/x.png", "the folder nowhere does not exist"),
        ("scaling --core 3", "unknown flag --core. Did you mean '--cores'?"),
        ("sweep --values 16,x", "--values is '16,x'; expected whole numbers >= 1"),
        ("sweep --axis batch", "batch-size"),
        ("sweep --lines unroll=3", "--lines is 'unroll=3'; expected another axis and its values"),
        ("sweep --lines batch-size=3", "--lines is 'batch-size=3'; expected another axis"),
        ("sweep --lines unroll-length=", "--lines is 'unroll-length='"),
        ("sweep --lines unroll-length=0", "--lines is '0'"),
        ("sweep --cores all", "--cores is 'all'; expected auto or a number"),
        ("sweep --actor-cores 0", "--actor-cores is 0"),
        ("sweep --unroll-length 0", "--unroll-length is 0"),
        pytest.param(  # seen by the process that looks first
            "sweep --env cach", "unknown environment 'cach'. Did you mean 'catch'?", marks=pytest.mark.slow
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, line, says):
    monkeypatch.chdir(tmp_path)
    assert bench(*line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.startswith("podracer: ") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def options(kind=points.Options, **changes):
    return kind(platform="cpu", **{"env": "catch", "agent": "a2c", **changes})


def traced(kind=points.Options, cores=1, env_options=None, agent_options=None, settings=None, **changes):
    """What the process that looks first says of one task."""
    chosen = options(kind, **changes)
    recipe = figures.recipe(chosen, env_options or {}, agent_options or {})
    task = worker.Task(chosen.architecture, recipe, chosen.settings(8, 1) | (settings or {}), cores, "cpu")
    return worker.look([dataclasses.asdict(task)], "not here")


@pytest.mark.parametrize(
    "given, says",
    [
        ({"env_options": {"row": 3}}, "catch has no option 'row'"),
        ({"agent_options": {"epoch": 3}}, "unknown agent setting 'epoch'"),
        ({"agent_options": {"learning_rate": "fast"}}, "a2c on catch cannot be built"),
        ({"env_options": {"rows": 0}}, "a2c on catch cannot be built"),
        ({"env": "atari/Pong"}, "atari/Pong"),  # not for Anakin
        ({"architecture": "sebulba", "cores": 2, "settings": {"actor_cores": 2}}, "actor_cores is 2 of 2 cores"),
        (
            {"architecture": "sebulba", "cores": 4, "settings": {"batch_size": 4, "actor_cores": 1}},
            "does not divide into learner cores",
        ),
        ({"architecture": "sebulba", "lag": "late"}, "lag is 'late'"),
    ],
)
def test_what_cannot_be_built_is_said_before_anything_is_measured(given, says):
    with pytest.raises(UserError, match=says):
        traced(**given)


def test_looking_says_what_a_picture_must_know():
    facts = traced()
    assert (facts["frame_skip"], facts["platform"], facts["first_process"]) == (1, "cpu", True)
    with pytest.raises(UserError, match="no plan"):
        worker.look("no plan", "not here")


def shapes(kind, **changes):
    chosen = options(**changes)
    cores, hosts = figures.numbers("--cores", chosen.cores), figures.numbers("--hosts", chosen.hosts)
    plan = points.shapes(kind, chosen, cores, hosts)
    return [(each.hosts, each.cores, each.environments, each.baseline) for each in plan]


def test_weak_scaling_adds_environments_and_virtual_cores_share_them():
    assert shapes("devices", cores="1,4", batch_size=16) == [(1, 1, 16, False), (1, 4, 64, False)]
    assert shapes("pinned", cores="1,2", batch_size=16, pinned=True) == [(1, 1, 16, False), (2, 1, 32, False)]
    assert shapes("virtual", cores="2,4", hosts="1,2", batch_size=16) == [
        *[(1, 2, 16, False), (1, 4, 16, False), (2, 2, 16, False), (2, 4, 16, False)],
        *[(1, 1, 8, True), (1, 1, 4, True), (1, 1, 2, True)],  # what one of 2, 4 and 8 cores does
    ]
    with pytest.raises(UserError, match=r"--batch-size = 10 does not divide into cores = 4 equal parts"):
        shapes("virtual", cores="1,4", batch_size=10)


def test_the_cores_of_sebulba_are_split_and_each_thread_gets_its_part():
    chosen = options(architecture="sebulba", cores="1,2,8", batch_size=64, actor_fraction=0.25)
    recipe = figures.recipe(chosen, {}, {})
    plan = points.shapes("devices", chosen, [1, 2, 8], [1])
    tasks = [points.task(chosen, recipe, shape) for shape in plan]
    found = [(task.cores, task.settings["actor_cores"], task.settings["batch_size"]) for task in tasks]
    assert found == [(1, 1, 32), (2, 1, 64), (8, 2, 128)]  # 64 environments per core, on 2, 2 and 4 threads


def row(cores, speeds, work, environments=8, baseline=False):
    """As `scaling.row` makes them of blocks."""
    blocks = [
        {"steps_per_s": speed, "cpu_seconds": cpu * 1e-6, "steps": 1, "seconds": 1.0}
        for speed, cpu in zip(speeds, work, strict=True)
    ]
    measured = scaling.turns.Measured.of(blocks, {"compile_s": 0.0}, 0.0)
    facts = {"device_kind": "cpu", "frame_skip": 4, "started": "now", "processes": 1}
    return scaling.row("virtual", points.Shape(1, cores, environments, baseline), measured, facts)


def test_efficiency_is_throughput_per_core_round_by_round():
    """Half as fast in one round and as fast in another is between the two, whatever the rounds were like."""
    found = scaling.efficiencies([row(2, [200, 100, 30], [1, 1, 1]), row(1, [100, 100, 20], [1, 1, 1])])
    assert [found[0][f"efficiency_{which}"] for which in ("median", "low", "high")] == [0.75, 0.5, 1.0]
    assert found[1]["efficiency_median"] == 1 and found[0]["frames_per_s_median"] == 400
    assert "samples" not in found[0]


def test_overhead_is_cpu_time_above_the_best_single_core():
    rows = [
        row(1, [1, 1, 1], [20, 20, 20]),
        row(8, [1, 1, 1], [12, 11, 5]),
        row(1, [1, 1, 1], [10, 10, 4], environments=1, baseline=True),
    ]
    found = scaling.overheads(rows)
    assert [round(each["overhead_median"], 3) for each in found] == [1.0, 0.2, 0.0]
    assert {each["against_environments"] for each in found} == {1}


def test_points_of_other_kinds_are_in_no_common_picture(tmp_path):
    chosen, facts = options(), {"platform": "tpu"}
    for mine, its in (("virtual", "virtual"), ("pinned", "virtual"), ("devices", "pinned")):
        with pytest.raises(UserError, match="Only measurements of devices, or of pinned cores, can be in one picture"):
            scaling.check_kind(mine, chosen, facts, [{"kind": its}])
    scaling.check_kind("devices", chosen, facts, [{"kind": "devices"}])
    with pytest.raises(UserError, match="--hosts is 1,2 on tpu: a command cannot start the hosts of a slice"):
        scaling.check_kind("devices", options(hosts="1,2"), facts, [])
    (tmp_path / "x.json").write_text('{"figure": "sweep"}')
    with pytest.raises(UserError, match=r"expected a \.json that `podracer bench scaling` wrote"):
        scaling.read(tmp_path / "x.json")


def test_a_sweep_varies_one_thing_and_its_lines_another():
    chosen = options(
        sweep.Options, axis="num-simulations", values="4,2", lines="batch-size=8,16", agent="gumbel-muzero"
    )
    recipe = figures.recipe(chosen, {}, {"td_steps": 7})
    found = [sweep.task(chosen, recipe, point) for point in sweep.points(chosen)]
    varied = [(task.settings["batch_per_core"], task.recipe["agent_config"]["num_simulations"]) for task in found]
    assert varied == [(8, 2), (8, 4), (16, 2), (16, 4)]
    assert {task.recipe["agent_config"]["td_steps"] for task in found} == {7}
    assert found[0].recipe["network"] == "muzero"  # of the preset for Catch
    facts = traced(sweep.Options, agent="gumbel-muzero", agent_options={"num_simulations": 2})
    assert sweep.title(chosen, facts | {"local_devices": 3, "processors": 2}).endswith("3 virtual cpu cores")
    # On four hosts the speed is that of all of them, and so are the cores; environments alone are one host's.
    four = facts | {"local_devices": 4, "processes": 4, "platform": "tpu", "device_kind": "TPU v5e"}
    assert sweep.title(chosen, four).endswith("16 TPU v5e cores")
    blocks = [{"steps": 100.0, "seconds": 1.0, "steps_per_s": 100.0, "cpu_seconds": 1.0}]
    measured = turns.Measured.of(blocks, {"compile_s": 1.0}, 1.0)
    trained, alone = (sweep.row(sweep.Point({"batch-size": 8}, alone), measured, four) for alone in (False, True))
    assert (trained["steps_per_s_median"], alone["steps_per_s_median"]) == (100, 400)
    found = sweep.headline(options(sweep.Options, batch_size=8, unroll_length=5), [trained], four)
    assert (found["num_cores"], found["update_s"]) == (16, 16 * 8 * 5 / 100)


def test_bench_alone_lists_its_figures(capsys):
    assert bench() == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: podracer bench {") and "  scaling " in out and "  sweep " in out


def make_loop(delay_s=0.0, lag=Lag(1, True)):
    from podracer import agents, networks

    env = Scripted(batch_size=8, delay_s=delay_s)
    return Sebulba(agents.a2c(env.spec, network=networks.mlp((8,))), env, split(2, 1, 2, 8), 4, lag)


def test_speed_is_counted_over_whole_updates_after_the_first_ones():
    """Environments that sleep say how fast it can be: 8 steps per thread and sleep."""
    loop = make_loop(delay_s=0.02)
    loop.compile()
    found = measure.training(loop, 0.5)
    assert found.updates >= 2 and found.done.steps == found.updates * loop.steps_per_update
    assert loop.learner.updates == found.updates + loop.lag.updates + 1
    assert found.done.seconds >= 0.5
    limit = 2 * 8 / 0.02
    assert 0.3 * limit < found.done.steps_per_s <= limit * 1.05
    assert 0.3 * limit < measure.ceiling(loop.env, 2, 0.5).steps_per_s <= limit
    assert measure.training(loop, 0.1).updates >= 1  # another run of the same loop
    assert not OPEN


def test_blocks_go_on_from_one_another_until_told_to_stop():
    seen = []
    loop = make_loop()
    measure.blocks(loop, 0.05, lambda block: bool(seen.append(block)) or len(seen) < 4)
    assert seen[0] is None and len(seen) == 4
    assert loop.learner.updates == 2 + sum(block.updates for block in seen[1:])
    assert set(seen[1].waits) >= {"environment", "inference", "queue_get", "learner_step"}


def test_parts_alone_leave_the_environments_closed():
    loop = make_loop()
    for part, steps in ((measure.Inference(loop), 8), (measure.Learning(loop), loop.steps_per_update)):
        done = part(0.05)
        assert done.steps > 0 and done.steps % steps == 0 and done.seconds >= 0.05
    assert not OPEN
    measure.training(loop, 0.05)  # the params that the parts took are not the learner's own
