"""The house rules of the design, read from the sources: who may import whom, and what no file may hold.

Nothing here runs the package, apart from the public names and the wheel.
"""

import ast
import configparser
import functools
import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kvcompile", "kernels", "tests", "bench", "docs", "examples", "tools")

# A module imports from its own tier or lower ones only; a package's files share its tier.
TIERS = (
    ("errors", "_later"),
    ("layout", "topology"),
    ("fields", "memory"),
    ("overlap", "overlays", "handshake", "tensors", "cache", "arena", "descriptors"),
    ("models", "table", "lanes", "strided", "bridge", "lowering", "shapes"),
    ("_jit", "kernels"),
    ("backend",),
    ("request", "program", "explain"),
    ("plan", "device", "staging"),
    ("proof", "engines", "spec", "together"),
    ("adapters",),
    ("cli",),
)
# What only some places may import: outside module -> parts of the package.
GUARDED = {
    "numba.cuda": (
        "_jit",
        "kernels.cuda",
        *(f"kernels.cuda_{part}" for part in ("check", "descriptors", "memory", "scan")),
    ),
    "mooncake": ("engines",),
    "typer": ("cli",),
    "rich": ("cli",),
    "cupy": ("device.memory",),
    **dict.fromkeys(("torch", "jax", "vllm", "sglang", "flashinfer", "tensorrt_llm", "lmcache"), ("adapters",)),
}
# Hosts a tracked file may name: loopback, this project's standards and licence.
HOSTS = ("127.0.0.1", "localhost", "www.w3.org", "www.apache.org", "github.com")


def sources(*folders: str) -> list[Path]:
    """List the Python files below some folders of the checkout, each once (the link kvcompile/kernels apart)."""
    found = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in found if "kvcompile/kernels" not in path.as_posix())


def module_of(path: Path) -> str:
    """Return a package file's name below kvcompile: `plan`, `kernels.cpu`, `engines` for its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "kvcompile" else parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


MODULES = {module_of(path): path for path in sources("kvcompile", "kernels")}
MODULES_BELOW_ROOT = {name: path for name, path in MODULES.items() if name}


def imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports, `from a import b` as `a.b`, relative ones with their dots."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {"." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def inside(path: Path) -> set[str]:
    """Return the modules below kvcompile that a file imports; the root itself is the empty name."""
    found = set()
    for imported in imports(path):
        package, _, module = imported.partition(".")
        if package == "kvcompile":
            while module and module not in MODULES and module != "kernels":
                module = module.rpartition(".")[0]
            found.add(module)
    return found


def tier(module: str) -> int:
    """Return the tier of a module of the package, by its first part."""
    part = module.partition(".")[0]
    found = [index for index, names in enumerate(TIERS) if part in names]
    if not found:
        pytest.fail(f"kvcompile/{part} has no place in TIERS: say where it stands")
    return found[0]


@pytest.mark.parametrize("module", MODULES_BELOW_ROOT)
def test_imports_point_down(module: str) -> None:
    wrong = {name for name in inside(MODULES[module]) if name and tier(name) > tier(module)}
    assert not wrong, f"{module} (tier {tier(module)}) imports {wrong} from above"


@pytest.mark.parametrize("module", MODULES_BELOW_ROOT)
def test_only_what_stands_above_the_core_imports_its_root(module: str) -> None:
    assert "" not in inside(MODULES[module]) or tier(module) > tier("plan"), (
        f"{module} imports from kvcompile itself: name the module it wants"
    )


def test_named_directions() -> None:
    """The sentences of the design's section 10 that tiers alone do not say."""
    used = {module: inside(path) for module, path in MODULES_BELOW_ROOT.items()}
    for module, names in used.items():
        heads = {name.split(".")[0] for name in names}
        if module in ("layout", "topology"):
            assert heads <= {"errors", "layout", "topology"}, f"{module} imports {heads}"
        if module.startswith("kernels"):
            assert heads <= {"kernels", "_jit"}, f"{module} imports {heads}"
        if module.split(".")[0] not in ("backend", "device", "kernels"):
            # The host may know what the columns of shared arrays are called, and no more.
            drivers = {name for name in names if name.startswith("kernels")} - {"kernels.item"}
            assert not drivers, f"{module} imports {drivers}, not through backend"
        for owner in ("engines", "adapters", "cli"):
            if owner in heads:
                assert module.split(".")[0] in (owner, "adapters", "cli"), f"{module} imports {owner}"


def test_lowering_reaches_no_kernels() -> None:
    reached, todo = set(), ["lowering"]
    while todo:
        module = todo.pop()
        if module in MODULES and module not in reached:
            reached.add(module)
            todo += inside(MODULES[module])
    assert not {name for name in reached if name.split(".")[0] in ("kernels", "backend", "plan", "_jit")}


@pytest.mark.parametrize("module", MODULES)
def test_guarded_imports(module: str) -> None:
    path = MODULES[module]
    attributes = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    names = imports(path) | (attributes & {"numba.cuda"})
    for guarded, owners in GUARDED.items():
        uses = [name for name in names if name == guarded or name.startswith(guarded + ".")]
        allowed = any(module == owner or module.startswith(owner + ".") for owner in owners)
        assert allowed or not uses, f"{module} uses {uses}; only {owners} may"


@pytest.mark.parametrize("path", sources(*FOLDERS), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, "over 400 lines"
    assert not text or ast.get_docstring(tree(path)), "no docstring that says what the file is"
    names = imports(path)
    assert not [name for name in names if name.startswith(".")], "relative import"
    assert not [name for name in names if name.endswith(".*")], "star import"
    assert not [name for name in names if name.split(".")[0] == "kernels"], "that is Hugging Face's `kernels`"


@pytest.mark.parametrize("module", MODULES)
def test_no_assert_guards_the_package(module: str) -> None:
    lines = [node.lineno for node in ast.walk(tree(MODULES[module])) if isinstance(node, ast.Assert)]
    assert not lines, f"bare assert in line {lines}"


def tracked() -> list[Path]:
    """List the text files that a clone holds: from git, or all but caches where there is no git."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        paths = [ROOT / line for line in listing.stdout.splitlines()]
    else:
        paths = [path for path in ROOT.rglob("*") if not re.search(r"/(\.|__|build|dist)", path.as_posix())]
    return [path for path in paths if path.is_file() and path.suffix not in (".png", ".gz", ".lock")]


def test_no_file_names_a_machine_or_a_host() -> None:
    found = []
    for path in tracked():
        if path.name == "LICENSE":
            continue
        text = path.read_text()
        places = re.finditer(r"(?<![\w.])/(work|root|home|opt|tmp|Users|mnt)/", text)
        found += [(path.name, place[0]) for place in places]
        hosts = re.findall(r"\b[a-z]+://([\w.-]+)", text)
        found += [(path.name, host) for host in hosts if host not in HOSTS]
    assert not found


def test_kernels_is_a_committed_link() -> None:
    link = ROOT / "kvcompile" / "kernels"
    assert link.is_symlink()
    assert link.readlink() == Path("../kernels")
    if (ROOT / ".git").exists():
        staged = subprocess.run(
            ["git", "ls-files", "-s", "kvcompile/kernels"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert staged.stdout.startswith("120000 "), "kvcompile/kernels is not committed as a link"
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide a real `kernels` package"


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    folders = {path.parent.relative_to(ROOT) for path in sources("kvcompile") if path.name == "__init__.py"}
    assert sorted(listed) == sorted({".".join(folder.parts) for folder in folders} | {"kvcompile.kernels"})


def test_public_names() -> None:
    package = importlib.import_module("kvcompile")
    shown = {name for name, value in vars(package).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert sorted(package.__all__) == sorted(shown)


def test_wheel(tmp_path: Path) -> None:
    """A wheel holds the kernels, the licence and py.typed, and lives beside a package named `kernels`."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for name in ("kvcompile", "kernels"):
        copytree(ROOT / name, copy / name, symlinks=True)
    build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy]
    subprocess.run(build, check=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path / "site")
    packaged = {name for name in names if name.endswith(".py")}
    expected = {
        path.relative_to(ROOT).as_posix().replace("kernels/", "kvcompile/kernels/", 1)
        if path.parent == ROOT / "kernels"
        else path.relative_to(ROOT).as_posix()
        for path in sources("kvcompile", "kernels")
    }
    assert packaged == expected
    assert "kvcompile/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    rival = tmp_path / "site" / "kernels"
    rival.mkdir()
    (rival / "__init__.py").write_text("rival = True\n")
    probe = (
        "import kernels, kvcompile, kvcompile.kernels.item as item;"
        "print(kernels.rival, kvcompile.__file__, item.__file__)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    rival_found, package_file, item_file = ran.stdout.split()
    assert rival_found == "True"
    assert Path(package_file) == tmp_path / "site" / "kvcompile" / "__init__.py"
    assert Path(item_file) == tmp_path / "site" / "kvcompile" / "kernels" / "item.py"
