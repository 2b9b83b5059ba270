""".ci/release.py: what it checks before a release can fail, and says why in a line."""

import runpy
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "release.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="no checkout around the tests")
RELEASE = runpy.run_path(str(SCRIPT)) if SCRIPT.is_file() else {}


def wrong(check: str, *given: object) -> str:
    """What a check says is wrong."""
    with pytest.raises(RELEASE["Wrong"]) as caught:
        RELEASE[check](*given)
    return str(caught.value)


def test_the_changelog_needs_this_version_and_its_day():
    RELEASE["check_changelog"]("# Changelog\n\n## 0.2.0 - 2026-12-31\n\n## 0.1.0 - old\n", "0.2.0")
    for text, said in (
        ("# Changelog\n", "CHANGELOG.md begins with no version, not with 0.2.0"),
        ("## 0.1.0 - 2026-12-31\n", "CHANGELOG.md begins with 0.1.0, not with 0.2.0"),
        ("## 0.2.0 - unreleased\n", "0.2.0 is of the day 'unreleased': write it as 2026-12-31"),
        ("## 0.2.0 - 2026-02-30\n", "0.2.0 is of the day '2026-02-30': write it as 2026-12-31"),
    ):
        assert wrong("check_changelog", text, "0.2.0") == said


@pytest.mark.parametrize("lost", ["kernels/ffn/a.cu", "kernels/README.md", "recipes/quick.yaml"])
def test_a_wheel_needs_kernels_recipes_and_guides(tmp_path, lost):
    names = ["kernels/ffn/a.cu", "kernels/README.md", "recipes/quick.yaml", "recipes/README.md"]
    for name in [*names, "kernels/LAB.md", "recipes/chart.json"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for held in (names, [name for name in names if name != lost]):
        with zipfile.ZipFile(tmp_path / "made.whl", "w") as wheel:
            for name in held:
                wheel.writestr(f"twellctl/_data/{name}", "")
        if held == names:
            RELEASE["check_wheel"](tmp_path / "made.whl", tmp_path)
    assert wrong("check_wheel", tmp_path / "made.whl", tmp_path) == f"made.whl lacks {lost}"


def test_what_does_not_install_or_answer_is_wrong(tmp_path, monkeypatch):
    """With the pip of these tests: to install one takes five seconds."""
    create = venv.create

    def with_this_pip(folder, with_pip):
        create(folder)
        (site,) = folder.glob("lib/python*/site-packages")
        found = [path for path in sys.path if path.endswith("-packages")] if with_pip else []
        (site / "these.pth").write_text("\n".join(found))

    monkeypatch.setattr(venv, "create", with_this_pip)
    (tmp_path / "none.whl").write_text("no wheel")
    assert "none.whl" in wrong("check_installed", tmp_path / "env", tmp_path / "none.whl", "0.2.0")
    failing = sys.executable, "-c", "import sys; print('one'); sys.exit('two\\nthree')"
    assert wrong("run", *failing).endswith(": three")


def test_a_failed_check_is_a_line_and_others_go_on(capsys):
    def fails():
        raise RELEASE["Wrong"]("lacks it")

    assert not RELEASE["failed"]({"one": lambda: None})
    assert RELEASE["failed"]({"one": fails, "two": lambda: None})
    assert capsys.readouterr().out.splitlines() == [
        "ok    one",
        "bad   one: lacks it",
        "ok    two",
    ]
