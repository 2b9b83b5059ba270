"""How the code is written: the length of functions, where the formatter may be switched off, what
scripts for developers import."""

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_PYTHON, MOST_CUDA = 60, 80  # lines of a function
MOST_SKIPS = 7
SKIP = "# fmt: " + "skip"  # in two parts: this line is none
LEAST_NUMBERS = 0.6  # share of numbers in a table of numbers


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository that match."""
    found = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in found.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def python_functions(source: str) -> Iterator[tuple[str, int]]:
    """(name, number of lines) of each function, decorators not counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def without_texts(source: str) -> str:
    """C++ without comments, texts, characters and preprocessor lines; lines keep their numbers."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    token = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:\\\n|[^\n])*'
    digits = re.compile(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])")  # 1'000 is no character
    return re.sub(token, blank, digits.sub("", source), flags=re.DOTALL | re.MULTILINE)


def cuda_functions(source: str) -> Iterator[tuple[str, int]]:
    """(name, number of lines, its head counted) of each function that is not inside another one.

    `ValueError` if braces do not match.
    """
    code = without_texts(source)
    open_braces: list[tuple[str, int] | None] = []  # (name, place of the head) of functions
    head = 0  # where the text began that leads to the next brace
    for place, character in enumerate(code):
        if character == "{":
            name = None if any(open_braces) else function_name(code[head:place])
            begin = head + len(code[head:place]) - len(code[head:place].lstrip())
            open_braces.append((name, begin) if name else None)
        elif character == "}":
            if not open_braces:
                raise ValueError(f"line {code[:place].count(chr(10)) + 1}: one brace too many")
            if function := open_braces.pop():
                yield function[0], code[function[1] : place].count("\n") + 1
        if character in "{};":
            head = place + 1
    if open_braces:
        raise ValueError("a brace is not closed")


def function_name(head: str) -> str | None:
    """The name of the function that `head` begins; None for a type, a namespace or a value."""
    head = re.sub(
        r"\b(?:__launch_bounds__|__align__|alignas)\s*\([^()]*(?:\([^()]*\))*\)", "", head
    )
    while match := re.match(r"\s*template\s*<", head):
        depth, end = 1, match.end()
        while depth and end < len(head):
            depth += {"<": 1, ">": -1}.get(head[end], 0)
            end += 1
        head = head[end:]
    if re.match(r"\s*(?:struct|class|union|enum|namespace)\b", head):
        return None
    found = re.search(r"(\w+|operator\s*[^\s\w(]+)\s*\(", head)
    return found[1] if found and "=" not in head[: found.start()] else None


CUDA = """
// { a comment
namespace tile {
template <int N, class T = int>
struct __align__(16) Pair {
  T values[N] = {1, 2};
  __device__ T first() const { return values[0]; }
};
#define OPEN {
constexpr int SIZES[] = {1, 2};
extern "C" __global__ void __launch_bounds__(128, 1)
    kernel(const char* text = "}") {
  for (int i = 0; i < 1'000; ++i) {
    auto inner = [&](int j) {
      return j == '{';
    };
  }
}
}  // namespace tile
"""


def test_functions_of_cuda_are_counted():
    assert list(cuda_functions(CUDA)) == [("first", 1), ("kernel", 8)]


@pytest.mark.parametrize("broken", ["void f() {", "void f() {}}"])
def test_braces_that_do_not_match_are_an_error(broken):
    with pytest.raises(ValueError, match="brace"):
        list(cuda_functions(broken))


@pytest.mark.parametrize(
    ("patterns", "functions", "most"),
    [
        (("twellctl/*.py", ".ci/*.py"), python_functions, MOST_PYTHON),
        (("kernels/*.cu", "kernels/*.cuh"), cuda_functions, MOST_CUDA),
    ],
    ids=["Python", "CUDA"],
)
def test_no_function_is_long(patterns, functions, most):
    found = [
        (f"{path.relative_to(ROOT)}: {name}", lines)
        for path in tracked(*patterns)
        for name, lines in functions(path.read_text(encoding="utf-8"))
    ]
    assert len(found) > 100
    assert not [function for function in found if function[1] > most]


def skips_of(source: str) -> Iterator[tuple[int, float]]:
    """(line, share of numbers in the statement or decorator) for each `SKIP`."""
    lines = [number for number, line in enumerate(source.splitlines(), 1) if SKIP in line]
    if not lines:
        return
    nodes: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            nodes += [node, *getattr(node, "decorator_list", [])]
    for line in lines:
        around = [n for n in nodes if n.lineno <= line <= n.end_lineno]
        smallest = min(around, key=lambda n: n.end_lineno - n.lineno)
        yield line, share_of_numbers(smallest)


def share_of_numbers(node: ast.AST) -> float:
    """Of the values in `node`; None stands for a number that there is not."""
    values = [n for n in ast.walk(node) if isinstance(n, ast.Constant)]
    numbers = [n for n in values if isinstance(n.value, int | float | None)]
    return len(numbers) / max(len(values), 1)


TABLES = """
SIZES = [
    (1, 2), (3, 4),
]  # fmt: skip
CALLS = {
    "open": (1, None), "close": (2, 3),
}  # fmt: skip
@given(
    ("a", "b"), 3,
)  # fmt: skip
def test(): pass
"""


def test_tables_of_numbers_are_known():
    found = [(line, round(share, 2)) for line, share in skips_of(TABLES)]
    assert found == [(4, 1.0), (7, 0.67), (10, 0.33)]


def test_only_tables_of_numbers_are_formatted_by_hand():
    skips = [
        (f"{path.relative_to(ROOT)}:{line}", share)
        for path in tracked("*.py")
        if path != Path(__file__)
        for line, share in skips_of(path.read_text(encoding="utf-8"))
    ]
    assert len(skips) <= MOST_SKIPS
    assert not [place for place, share in skips if share < LEAST_NUMBERS]


def test_scripts_for_developers_import_what_there_is():
    """Most of them run on a GPU alone, so no other test would tell."""
    found = [
        (node.module, alias.name)
        for path in tracked(".ci/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("twellctl")
        for alias in node.names
    ]
    assert len(found) > 10
    for module, name in found:
        has = hasattr(importlib.import_module(module), name)
        assert has or importlib.util.find_spec(f"{module}.{name}"), (module, name)
