"""Where the files that are not Python lie, and which of them an export carries."""

from pathlib import Path

_DOOR = "modeling_twell.py"


def resource_dir(name: str) -> Path:
    """The folder `name` ("kernels" or "recipes") that came with this installation."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_data" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"twellctl's own folder {name!r} is missing: install twellctl again")


def kernel_files() -> dict[str, bytes]:
    """{path in kernels/: text} of all kernels and their headers, and of `TEXTS`."""
    from twellctl.bundle.twell_spec import TEXTS

    folder = resource_dir("kernels")
    files = (path for path in sorted(folder.rglob("*")) if path.suffix in (".cu", ".cuh"))
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return found | {name: f'#include "{text}"\n'.encode() for name, text in TEXTS.items()}


def bundle_files() -> dict[str, bytes]:
    """{name inside an export: content}: what an export carries so that it runs without twellctl.

    Of the kernels these are the sources of what its code may launch, their headers, and README.md,
    which draws the format.
    """
    from twellctl.bundle.twell_nvrtc import with_headers
    from twellctl.bundle.twell_reasons import ALL_KERNELS
    from twellctl.bundle.twell_spec import ENTRY_FILES

    code = Path(__file__).resolve().parent.parent / "bundle"
    files = {path.name: path.read_bytes() for path in sorted(code.glob("*.py"))}
    del files["__init__.py"]
    # Transformers before 5 copies only what the door itself names, and then looks for the rest.
    names = (Path(name).stem for name in files if name != _DOOR)
    named = "".join(f"    from .{name} import __name__ as _\n" for name in names)
    files[_DOOR] += f"\nif False:\n{named}".encode()
    sources = kernel_files()
    kernels = {"README.md": (resource_dir("kernels") / "README.md").read_bytes()}
    for source in {ENTRY_FILES[entry] for entry in ALL_KERNELS}:
        kernels |= with_headers(source, sources)
    return files | {f"twell_kernels/{name}": kernels[name] for name in sorted(kernels)}
