"""Builds a release of the last commit, checks it, and says what a person does then.

    python .ci/release.py DIST

DIST gets the sdist and the wheel; nothing is tagged or uploaded. Needs git, and the index that pip
is set up for: the tools and the release are installed in fresh environments. Exits with 1 if a
check fails.
"""

import argparse
import datetime
import io
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = {"kernels": (".cu", ".cuh"), "recipes": (".yaml",)}  # what a wheel must hold, with a README
LOOK = ("--help", "doctor")  # what an installation must answer


class Wrong(Exception):
    """Why a check fails, in a line."""


def run(*words: object, cwd: Path | None = None) -> str:
    """What a command prints; `Wrong`, with its last line, if it fails."""
    done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise Wrong(f"{Path(str(words[0])).name} {' '.join(map(str, words[1:]))}: {said[-1]}")
    return done.stdout


def committed(folder: Path) -> Path:
    """The last commit's files, in `folder`."""
    made = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def environment(folder: Path, *wanted: object) -> Path:
    """A fresh one with what is `wanted`; its folder of programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", *wanted, cwd=folder)
    return programs


def check_changelog(text: str, version: str) -> None:
    """`Wrong` unless the newest version that it names is this one, with the day of its release."""
    found = re.search(r"^## (\S+) - (.+)$", text, re.MULTILINE)
    if found is None or found[1] != version:
        first = "no version" if found is None else found[1]
        raise Wrong(f"CHANGELOG.md begins with {first}, not with {version}")
    try:
        datetime.date.fromisoformat(found[2])
    except ValueError:
        raise Wrong(f"{version} is of the day '{found[2]}': write it as 2026-12-31") from None


def check_wheel(wheel: Path, source: Path) -> None:
    """`Wrong` unless the wheel holds all kernels and recipes of `source`, and their guides."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, kinds in DATA.items():
        paths = [path for path in (source / folder).rglob("*") if path.suffix in kinds]
        for path in sorted([*paths, source / folder / "README.md"]):
            name = path.relative_to(source).as_posix()
            if f"twellctl/_data/{name}" not in names:
                raise Wrong(f"{wheel.name} lacks {name}")


def check_installed(folder: Path, wheel: Path, version: str) -> None:
    """`Wrong` unless the wheel installs in a fresh environment, with what it needs, and answers."""
    programs = environment(folder, wheel)
    said = run(programs / "twellctl", "--version", cwd=folder).strip()
    if said != f"twellctl {version}":
        raise Wrong(f"what {wheel.name} installed says '{said}'")
    for words in LOOK:
        run(programs / "twellctl", words, cwd=folder)


def failed(checks: dict[str, Callable[[], object]]) -> bool:
    """Whether one of the checks fails; each is a line on the screen."""
    wrong = False
    for what, check in checks.items():
        try:
            check()
            print(f"ok    {what}")
        except Wrong as error:
            print(f"bad   {what}: {error}")
            wrong = True
    return wrong


def left_to_do(version: str, dist: Path, urls: dict[str, str]) -> list[str]:
    """What a person does to release what was checked."""
    commit = run("git", "rev-parse", "--short", "HEAD", cwd=ROOT).strip()
    steps = ["run 'pytest tests/gpu' as CONTRIBUTING.md says, on a GPU"]
    if not {"Repository", "Source"} & urls.keys():
        steps.append(
            "name the repository in pyproject.toml (urls); on an index README's links to guides, "
            "and its picture, lead nowhere unless they are whole addresses"
        )
    return [
        *steps,
        f"git tag -a v{version} -m 'twellctl {version}' {commit} && git push origin v{version}",
        f"twine upload {dist}/twellctl-{version}*",
    ]


def built(source: Path, dist: Path, tools: Path) -> tuple[Path, Path, str]:
    """The sdist and the wheel in `dist`, built of `source`, and their version."""
    version = runpy.run_path(str(source / "twellctl" / "version.py"))["__version__"]
    run(tools / "python", "-m", "build", "--outdir", dist, source)
    sdist = dist / f"twellctl-{version}.tar.gz"
    return sdist, dist / f"twellctl-{version}-py3-none-any.whl", version


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("dist", type=Path)
    dist = given.parse_args().dist.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = committed(folder / "source")
        tools = environment(folder / "tools", "build", "twine")
        sdist, wheel, version = built(source, dist, tools)
        changelog = (source / "CHANGELOG.md").read_text(encoding="utf-8")
        is_wrong = failed(
            {
                "CHANGELOG.md": lambda: check_changelog(changelog, version),
                "metadata": lambda: run(tools / "twine", "check", "--strict", sdist, wheel),
                "kernels, recipes, guides": lambda: check_wheel(wheel, source),
                "fresh environment": lambda: check_installed(folder / "clean", wheel, version),
            }
        )
        urls = tomllib.loads((source / "pyproject.toml").read_text())["project"]["urls"]
    if not is_wrong:
        print("left for a person:", *left_to_do(version, dist, urls), sep="\n  ")
    return int(is_wrong)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Wrong as error:
        sys.exit(f"error: {error}")
