"""Which room a line of code belongs in: who imports whom, and what is named where, read from the source."""

from __future__ import annotations

import ast
import functools
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("podracer", "anakin", "sebulba", "muzero", "launch")
BETWEEN = {"anakin", "sebulba", "muzero"}
MAY_IMPORT = {
    "podracer": {"podracer"},
    "anakin": {"anakin", "podracer"},
    "sebulba": {"sebulba", "podracer"},
    "muzero": {"muzero", "podracer"},
    "launch": set(PACKAGES),
}
# Installed with an extra, heavy, or with effects of their own: imported in one file, when they are needed.
ON_DEMAND = (
    *("envpool", "gymnasium", "ale_py", "brax", "gymnax", "jumanji", "pgx", "navix", "xminigrid", "craftax"),
    *("orbax", "wandb", "tensorboardX", "matplotlib", "imageio", "ray"),
)
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def short(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(node: ast.AST, path: pathlib.Path) -> set[str]:
    """Dotted names of everything that is imported under `node`; `from a import b` counts as a and as a.b."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            found |= {alias.name for alias in each.names}
        elif isinstance(each, ast.ImportFrom):
            assert each.level == 0, f"{short(path)}:{each.lineno}: relative import"
            found |= {each.module or "", *(f"{each.module}.{alias.name}" for alias in each.names)}
    return found


def top_level_imports(path: pathlib.Path) -> set[str]:
    """What importing the file imports: everything but what stands in functions or under TYPE_CHECKING."""
    found, todo = set(), list(tree(path).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= imports(node, path)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return found


def names(path: pathlib.Path) -> set[str]:
    """Every name, attribute and imported name in the code of a file; words in comments and strings do not count."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found |= set(node.name.split("."))
    return found


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_the_packages_are_there():
    """The rules below are about files that exist."""
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)
    assert len(FILES) > 40


@pytest.mark.parametrize("path", FILES, ids=short)
def test_imports_go_from_launch_over_the_architectures_to_podracer(path):
    """Also inside functions. The three in the middle never import one another."""
    package = path.relative_to(ROOT).parts[0]
    mine = {name.partition(".")[0] for name in imports(tree(path), path)} & set(PACKAGES)
    assert mine <= MAY_IMPORT[package]


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("podracer.envs", "podracer.agents"),
        ("podracer.envs", "podracer.networks"),
        ("podracer.networks", "podracer.envs"),
        ("podracer.networks", "podracer.agents"),
        ("podracer.agents", "podracer.envs"),
    ],
)
def test_environments_networks_and_agents_meet_in_the_specs_alone(room, forbidden):
    inside = [path for path in FILES if under(module_name(path), room)]
    assert inside
    for path in inside:
        assert not [name for name in imports(tree(path), path) if under(name, forbidden)], short(path)


def test_meshes_and_means_over_cores_are_named_in_one_file():
    """`check_vma` and its missing or doubled means are one file's worry."""
    words = {"shard_map", "Mesh", "pmean", "psum", "pmin", "pmax", "pmap", "axis_index", "PartitionSpec"}
    assert {short(path) for path in FILES if names(path) & words} == {"podracer/mesh.py"}


def test_threads_and_queues_live_in_sebulba():
    """Elsewhere nothing starts or locks a thread, but what watches; asking which thread one is in is allowed."""
    for path in FILES:
        if under(module_name(path), "sebulba") or short(path) == "podracer/watchdog.py":
            continue
        found = imports(tree(path), path)
        banned = {"queue", "concurrent", "multiprocessing", "asyncio", "_thread"}
        assert not {name.partition(".")[0] for name in found} & banned, short(path)
        assert not names(path) & {"Thread", "Lock", "RLock", "Condition", "Event", "Semaphore", "Timer", "Barrier"}, (
            short(path)
        )


@pytest.mark.parametrize("library", ON_DEMAND)
def test_a_library_on_demand_is_imported_in_one_file_inside_a_function(library):
    users = [path for path in FILES if any(under(name, library) for name in imports(tree(path), path))]
    assert len(users) <= 1, users
    for path in users:
        assert not [name for name in top_level_imports(path) if under(name, library)], short(path)


def test_top_level_imports_stay_within_the_required_dependencies():
    """What `import podracer` needs is JAX and its small libraries."""
    allowed = {"jax", "flax", "optax", "chex", "rlax", "mctx", "numpy", "__future__", *PACKAGES}
    for path in FILES:
        mine = {name.partition(".")[0] for name in top_level_imports(path)}
        assert mine <= allowed | set(sys.stdlib_module_names), short(path)


def test_importing_everything_does_no_work():
    """No backend is started, no environment variable or JAX setting changed, no library on demand loaded."""
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import jax, flax.nnx, optax, chex, rlax
from jax._src import xla_bridge
def settings():
    return {{name: getattr(jax.config, name) for name in dir(jax.config) if name.startswith("jax_")}}
before, config = dict(os.environ), settings()
assert not xla_bridge.backends_are_initialized()
import importlib
for name in {[module_name(path) for path in FILES]!r}:
    importlib.import_module(name)
    assert not xla_bridge.backends_are_initialized(), name + " starts a backend"
    assert dict(os.environ) == before, name + " changes the environment"
    assert settings() == config, name + " changes JAX's settings"
    loaded = [each for each in {ON_DEMAND!r} if each in sys.modules]
    assert not loaded, f"{{name}} loads {{loaded}}"
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "done", done.stderr[-2000:]


def test_the_import_contracts_of_the_project_hold():
    """The same layers as import-linter knows them, from pyproject.toml."""
    program = shutil.which("lint-imports", path=str(pathlib.Path(sys.executable).parent)) or shutil.which(
        "lint-imports"
    )
    if program is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "0 broken" in done.stdout and " 0 kept" not in done.stdout
