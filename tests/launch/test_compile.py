"""Programs for TPUs that are not here: what they need, send and compute. Needs the TPU compiler, `podracer[tpu]`."""

from __future__ import annotations

import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from launch import cli, program, topology
from podracer import mesh

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install 'podracer[tpu]'"
)
ANAKIN = "train anakin --env catch --agent a2c --network.hidden 16 --unroll-length 4"
SEBULBA = "train sebulba --env envpool/CartPole-v1 --agent impala --network.hidden 16"
MUZERO = (
    "train anakin --env catch --agent gumbel-muzero --preset none --network.width 16 --network.head-width 16 "
    "--batch-per-core 4 --unroll-length 8 --agent.num-simulations 2 --agent.sequence-length 8 --agent.replay-steps 256 "
    "--agent.min-replay 32 --agent.batch-size 8 --agent.unroll-steps 2"
)


def compiled(capfd, slice_: str, command: str) -> dict:
    jax.clear_caches()  # of what was traced for a CPU
    cli.main(["compile", "--topology", slice_, "--json", "--", *command.split()])
    jax.clear_caches()
    return json.loads(capfd.readouterr().out)


@pytest.fixture
def restored_cache():
    """JAX's own functions of its cache, whose folder is what it was, afterwards."""
    from jax.experimental.compilation_cache import compilation_cache

    kept = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield compilation_cache
    jax.config.update("jax_compilation_cache_dir", kept[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", kept[1])
    compilation_cache.reset_cache()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "command", "cores"),
    [
        ("v3:2x2", ANAKIN, 8),
        ("v5litepod-16", f"{SEBULBA} --batch-size 6", 12),
        ("v6e:2x4", MUZERO, 8),
        ("v3:32x32", ANAKIN, 2048),
    ],
    ids=["anakin", "sebulba's learner", "muzero", "anakin on the paper's 2,048 cores"],
)
def test_a_program_for_a_slice_fits_and_sends_its_gradients_once(capfd, topology, command, cores):
    """One all-reduce of 4 bytes per parameter; the rest are numbers of metrics. No trajectory travels."""
    (found,) = compiled(capfd, topology, command)["programs"]
    assert found["cores"] == cores
    assert found["fits"] and 0 < found["memory_bytes"] < 0.9 * found["memory_of_core_bytes"]
    assert {each["kind"] for each in found["collectives"]} == {"all-reduce"}
    once = found["updates_per_call"] > 1  # metrics of all updates of a call are averaged after its last
    summed = [each["num_bytes"] for each in found["collectives"] if once and each["per_call"]]
    assert sum(summed) <= 1_000 * found["updates_per_call"]
    sizes = sorted(each["num_bytes"] for each in found["collectives"] if not (once and each["per_call"]))
    # In float32. A few of the numbers that are averaged anyway may be in the same instruction.
    assert found["param_bytes"] <= sizes[-1] <= found["param_bytes"] + 64
    assert sum(sizes[:-1]) < 1_000
    assert found["param_bytes"] <= found["reduced_bytes_per_update"] < found["param_bytes"] + 1_000
    assert found["host"] == []


@needs_compiler
def test_programs_for_slices_stay_out_of_the_compilation_cache(capfd, tmp_path, restored_cache):
    """One kept there could not be loaded by the next command, on a machine without the slice."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    restored_cache.reset_cache()
    jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((5, 5)))  # JAX decides at its first program whether to use the cache
    before = sorted(tmp_path.iterdir())
    assert before
    compiled(capfd, "v3:2x2", ANAKIN)
    assert {path.name for path in tmp_path.iterdir() if "call" in path.name} == set()
    jax.jit(lambda x: jnp.cos(x) @ x)(jnp.ones((6, 6)))
    assert len(list(tmp_path.glob("*lambda*"))) > len([path for path in before if "lambda" in path.name])


@needs_compiler
def test_what_does_not_fit_is_said(capfd):
    """A replay of 16 GB on each core: refused by the compiler or by us, before anyone pays."""
    with pytest.raises(SystemExit) as exit:
        cli.main([*["compile", "--topology", "v5e:2x2", "--"], *ANAKIN.split(), "--batch-per-core", "40000000"])
    assert exit.value.code in (1, 2)
    said = " ".join(capfd.readouterr())
    assert "fit" in said and "Lower the batch size" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--topology is ''"),
        ("--topology v5e", "expected chips along each axis"),
        ("--topology v5e:0x4", "expected chips along each axis"),
        ("--topology v5:4x4", "Did you mean 'v5p'"),
        ("--topology v5litepod-9", "unknown TPU type 'v5litepod-9'; the number counts chips. Near it: v5litepod-4"),
        ("--topology v5e:4x4", "expected train ARCHITECTURE"),
        ("--topology v5e:4x4 -- eval runs/x", "expected train ARCHITECTURE"),
        ("--topology v5e:4x4 --slices 0 -- train anakin", "slices is 0"),
        ("--topology v5e:4x4 -- train anakin --env catch --agent a2c --cores 4", "leave out --cores"),
        ("--topology v5e:4x4 -- train anakin --env katch", "katch"),
    ],
)
def test_bad_input_is_refused_in_one_line(capfd, arguments, words):
    with pytest.raises(SystemExit) as exit:
        cli.main(["compile", *arguments.split()])
    assert exit.value.code == 2
    error = capfd.readouterr().err
    assert words in error and error.count("\n") == 1


@needs_compiler
@pytest.mark.parametrize(
    ("topology", "command", "words"),
    [
        ("v5e:1x1", ANAKIN, "unknown to the TPU compiler"),
        ("v5e:2x2", f"{SEBULBA} --actor-cores 4", "expected at most 3"),
        ("v5e:2x2", f"{SEBULBA} --batch-size 7 --actor-cores 1", "batch_size = 7"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(capfd, topology, command, words):
    with pytest.raises(SystemExit) as exit:
        cli.main(["compile", "--topology", topology, "--", *command.split()])
    assert exit.value.code == 2
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "full"),
    [("v5litepod-16", "v5e:4x4"), ("v3-2048", "v3:32x32"), ("v4-8", "v4:2x2x1"), ("v5e:4x4", "v5e:4x4"), ("", "")],
)
def test_a_slice_has_the_name_that_it_has_elsewhere(name, full):
    assert topology.full_name(name) == full


def test_work_counts_loops_as_often_as_they_run():
    """A product [2, 3] x [3, 3] is 36 flops, in a loop of 5 inside one of 4; the convolution is counted by hand."""

    def program_of(x, kernel, images):
        step = lambda x, _: (jax.lax.scan(lambda x, _: (x @ kernel, None), x, None, 5)[0], None)
        out = jax.lax.scan(step, x, None, 4)[0]
        return out, jax.lax.conv_general_dilated(images, jnp.ones((8, 3, 2, 2)), (1, 1), "VALID")

    shapes = (jnp.ones((2, 3)), jnp.ones((3, 3)), jnp.ones((1, 3, 5, 5)))
    found = program.work(jax.jit(program_of).trace(*shapes).jaxpr)
    assert found.flops == 4 * 5 * (2 * 2 * 3 * 3) + 2 * (8 * 4 * 4) * (3 * 2 * 2)
    assert not found.sums and not found.host and not found.unbounded


def test_work_sees_what_cores_reduce_and_what_the_host_is_asked():
    cores = mesh.make(4)

    def step(x):
        jax.debug.print("{}", x[0])
        return jax.lax.scan(lambda x, _: (x + mesh.total(x, mesh.CORE), None), x, None, 3)[0]

    over = jax.jit(mesh.over_cores(step, cores, mesh.SHARDED, mesh.SHARDED))
    found = program.work(over.trace(jnp.ones(8)).jaxpr)
    assert [(size, times) for _, size, times in found.sums] == [(2 * 4, 3)]
    assert found.host


def test_a_loop_that_nobody_can_count_is_said():
    endless = lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ x, x)
    found = program.work(jax.jit(endless).trace(jnp.ones((2, 2))).jaxpr)
    assert found.unbounded and found.flops == 16


def test_the_instructions_of_a_compiled_program_are_found():
    """Of XLA itself, on this machine's virtual cores."""
    cores = mesh.make(4)
    over = jax.jit(mesh.over_cores(lambda x: mesh.total(x, mesh.CORE), cores, mesh.SHARDED, mesh.REPLICATED))
    text = over.trace(jnp.ones((8, 3))).lower().compile().as_text()
    assert program.collectives(text) == [program.Collective("all-reduce", 1, 2 * 3 * 4, True)]
    again = lambda x: jax.lax.scan(lambda x, _: (jnp.sin(mesh.total(x, mesh.CORE)), None), x, None, 5)[0]
    looped = jax.jit(mesh.over_cores(again, cores, mesh.SHARDED, mesh.SHARDED))
    text = looped.trace(jnp.ones((8, 3))).lower().compile().as_text()
    assert program.collectives(text) == [program.Collective("all-reduce", 1, 2 * 3 * 4, False)]
    line = "  %x = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%y), dimensions={0}"
    assert program.collectives(line) == [program.Collective("all-gather", 1, 16 * 8 * 2, False)]
    line = "  %x = (f32[4]{0}, pred[3]{0}, s8[]) all-reduce(%a, %b, %c), to_apply=%add"
    assert program.collectives(line) == [program.Collective("all-reduce", 3, 16 + 3 + 1, False)]
    assert program.talks_to_host("  %x = token[] infeed(%y)\n  %a = f32[] add(%b, %c)") == ["infeed"]
