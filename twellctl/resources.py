"""Where the files that are not Python lie, `kernels/` and `recipes/`: in a wheel or a checkout."""

from pathlib import Path


def resource_dir(name: str) -> Path:
    """The folder `name` ("kernels" or "recipes") that came with this installation."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_data" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"twellctl's own folder {name!r} is missing: install twellctl again")


def bundle_files() -> dict[str, Path]:
    """{name inside an export: file}: what an export carries so that it runs without twellctl."""
    code = Path(__file__).resolve().parent / "bundle"
    files = {path.name: path for path in sorted(code.glob("*.py")) if path.name != "__init__.py"}
    kernels = resource_dir("kernels")
    sources = [p for p in sorted(kernels.iterdir()) if p.suffix in (".cu", ".cuh", ".md")]
    return files | {f"twell_kernels/{path.name}": path for path in sources}
