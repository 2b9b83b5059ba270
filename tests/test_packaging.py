"""What an installation holds, and what it must not make importable."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import twellctl
from twellctl.bundle.twell_nvrtc import with_headers
from twellctl.bundle.twell_reasons import ALL_KERNELS
from twellctl.bundle.twell_spec import ENTRY_FILES, SPEC, TEXTS
from twellctl.here.resources import bundle_files, kernel_files, resource_dir

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["twellctl", "kernels", "recipes", "tests"]
DATA = {"kernels": (".cu", ".cuh", ".md"), "recipes": (".yaml", ".md")}
PAGES = ("LAB", "LIMITS", "MEASURED", "SOURCES", "WAYS")
STAYS = {f"kernels/{name}.md" for name in PAGES} | {"recipes/LAB.md"}  # in the checkout
BUILD = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"
USED = """
import sys, twellctl
from twellctl import convert, export, load
from twellctl.here.resources import bundle_files, resource_dir
from twellctl.training.recipe import recipe_names
convert(sys.argv[1], "relu"), export("relu", "exported")
assert load("exported").generate("def ", max_tokens=2).text() is not None
print(resource_dir("kernels"), recipe_names(), sorted(bundle_files()), sep="\\n")
"""
pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="no checkout around the tests"
)


def run(*words: object, cwd: Path) -> str:
    """What a command prints; its interpreter has no working folder on its sys.path."""
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def python(code: str, cwd: Path) -> str:
    return run(sys.executable, "-c", code, cwd=cwd)


def sources(folder: str, suffixes: tuple[str, ...] = (".py",)) -> set[str]:
    paths = (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return {path.relative_to(ROOT).as_posix() for path in paths}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist, built from a copy of the checkout, and the wheel built of it."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools >= 77 builds the wheel")
    copy = tmp_path_factory.mktemp("build")
    for path in ROOT.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    for folder in SOURCES:
        suffixes = (".py", ".typed", ".html", ".css", ".js", *DATA["kernels"], *DATA["recipes"])
        for name in sources(folder, suffixes):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    sdist = python(BUILD.format("sdist", "dist"), copy).splitlines()[-1]
    with tarfile.open(copy / "dist" / sdist) as archive:
        archive.extractall(copy / "unpacked", filter="data")
    (unpacked,) = (copy / "unpacked").iterdir()
    python(BUILD.format("wheel", str(copy / "dist")), unpacked)
    return copy / "dist"


def test_the_wheel_holds_everything_and_nothing_but_the_package(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    found = set().union(*(sources(folder, DATA[folder]) for folder in DATA))
    assert found > STAYS
    data = {f"twellctl/_data/{name}" for name in found - STAYS}
    assert not [name for name in names if name.endswith((".svg", ".json"))]  # figures stay, too
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == sources("twellctl", (".py", ".html", ".css", ".js", ".typed")) | data
    assert "twellctl/report/page.html" in inside
    assert {f"twellctl/serving/page.{kind}" for kind in ("html", "css", "js")} <= inside
    assert {"twellctl/_data/recipes/paper.yaml", "twellctl/_data/kernels/README.md"} <= inside
    info = f"twellctl-{twellctl.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"twellctl", info}
    assert f"{info}/licenses/LICENSE" in names


def test_the_sdist_holds_what_the_wheel_is_built_from(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "LICENSE", "pyproject.toml"}
    for folder in ("twellctl", *DATA):
        wanted |= sources(folder, (".py", *DATA.get(folder, ())))
    assert wanted - STAYS <= names


def test_the_wheel_works_in_a_clean_environment(built, silu_llama, tmp_path):
    """As from an index, and with no checkout; only the dependencies are those of this one."""
    venv.create(tmp_path / "env")
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    found = [path for path in sys.path if path.endswith("-packages")]
    (site / "dependencies.pth").write_text("\n".join(found))
    programs = tmp_path / "env" / "bin"
    pip = sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-index"
    run(*pip, "--no-compile", "--no-deps", "--ignore-installed", *built.glob("*.whl"), cwd=tmp_path)
    try:
        run(*pip, "twellctl[cuda13x]", cwd=tmp_path)
    except AssertionError as error:  # all else that it wants is there, and no other twellctl is
        assert "No matching distribution found for cupy-cuda13x" in str(error)  # noqa: PT017
    said = run(programs / "twellctl", "--version", cwd=tmp_path)
    assert said == f"twellctl {twellctl.__version__}"
    found = run(programs / "python", "-c", USED, silu_llama, cwd=tmp_path).splitlines()
    assert found[0] == str(site / "twellctl" / "_data" / "kernels")
    assert all(name in found[1] for name in ("paper", "quickstart", "standard"))
    assert found[2] == str(sorted(bundle_files()))


def test_the_checkout_finds_its_data():
    assert (resource_dir("recipes") / "standard.yaml").is_file()
    with pytest.raises(FileNotFoundError, match="install twellctl again"):
        resource_dir("nothing")
    names = set(bundle_files())
    assert {"modeling_twell.py", "twell_format.py", "twell_kernels/README.md"} <= names
    code = {path.name for path in (ROOT / "twellctl" / "bundle").glob("*.py")}
    assert {name for name in names if "/" not in name} == code - {"__init__.py"}
    assert set(kernel_files()) - {*TEXTS} == set(map(inside, sources("kernels", (".cu", ".cuh"))))


def inside(path: str) -> str:
    """A path below the first folder of `path`."""
    return path.partition("/")[2]


def carried() -> dict[str, bytes]:
    """What an export has in twell_kernels/, by its path there."""
    files, folder = bundle_files(), "twell_kernels/"
    return {name.removeprefix(folder): files[name] for name in files if name.startswith(folder)}


def test_an_export_carries_no_kernel_of_the_decode_engine_and_no_lab_book():
    left = set(map(inside, sources("kernels", DATA["kernels"]))) - set(carried())
    assert {"MEASURED.md", "LAB.md", "decode/attend.cuh", "decode/step.cuh"} <= left
    kernels = {name for name in left if name.startswith(("ffn/", "train/", "decode/"))}
    assert all(name.startswith("decode/") for name in kernels)
    assert not [name for name in carried() if name.startswith("decode/")]


def test_the_kernels_of_an_export_compile():
    """All headers are there; `test_kernels_compile` compiles each source with just these."""
    files = carried()
    for name, text in files.items():
        included = re.findall(rb"^\s*#\s*include\s*(\S+)", text, re.MULTILINE)
        assert {header.strip(b'"').decode() for header in included} <= {*files, SPEC}, name
    for name in files:
        if name.endswith(".cu"):
            assert with_headers(name, files) == with_headers(name, kernel_files())


def test_an_export_carries_the_source_of_each_kernel_that_its_code_names():
    named = set()
    for file in (ROOT / "twellctl" / "bundle").glob("*.py"):
        if file.name != "twell_spec.py":  # its table has the decode engine's, too
            nodes = ast.walk(ast.parse(file.read_text()))
            named |= {node.value for node in nodes if isinstance(node, ast.Constant)}
    named &= {*ENTRY_FILES}
    assert {"gate_pack", "plan_cluster", "grad_x", "heavy_down"} <= named
    carried_sources = {name for name in carried() if name.endswith(".cu")}
    assert {ENTRY_FILES[entry] for entry in ALL_KERNELS} == carried_sources
    of_the_engine = {"decode/few_gated.cu"}  # few_linear's plan has them too
    assert {ENTRY_FILES[entry] for entry in named} - of_the_engine <= carried_sources


def test_no_package_called_kernels():
    """transformers probes for a package of that name and takes any folder that it can import."""
    assert not [path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".py", ".so")]
    assert not (ROOT / "tests" / "kernels").exists()
    assert not (ROOT / "conftest.py").exists()
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    assert str(ROOT) not in python(code, cwd=ROOT)
    assert python(code, cwd=ROOT) == "None" or "site-packages" in python(code, cwd=ROOT)


@pytest.mark.skipif(
    any(Path(entry).resolve() == ROOT for entry in sys.path),
    reason="'python -m pytest' puts the working folder on sys.path; run 'pytest'",
)
def test_pytest_does_not_make_it_importable():
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is not None


def test_only_commands_know_benches_and_screens():
    above = ("bench", "cli", "screens")
    for file in sorted((ROOT / "twellctl").rglob("*.py")):
        if file.relative_to(ROOT / "twellctl").parts[0] in (*above, "__main__.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                found = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
            elif isinstance(node, ast.Import):
                found = [name.name for name in node.names]
            else:
                found = ["rich"] if isinstance(node, ast.Name) and node.id == "print" else []
            upward = [f"twellctl.{room}" for room in above] + ["rich"]
            assert not [
                name for name in found for up in upward if f"{name}.".startswith(f"{up}.")
            ], file


TRAINING = {"twell_train", "twell_training", "twell_grad_plan"}  # kernels for the backward pass
DOORS = {
    "bundle/twell_ffn.py",
    "bundle/twell_model.py",
    "bundle/twell_reasons.py",  # how many tokens a backward pass takes
    "training/sparsity.py",
    "vllm/ffn.py",  # defines the operators before vLLM compiles
}


def test_the_kernels_for_training_have_few_doors():
    """A model in the bundle opens them, and fine-tuning what it trains."""
    package, importers = ROOT / "twellctl", set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                words = {*(node.module or "").split("."), *(name.name for name in node.names)}
                if words & TRAINING and file.stem not in TRAINING:
                    importers.add(file.relative_to(package).as_posix())
    assert importers == DOORS
