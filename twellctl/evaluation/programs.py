"""The program that judges a model's code: parts of the prompt, the code, and tests.

Of an answer's blocks of code, what the asked function needs is taken: its last full definition,
and the helpers, constants and imports that it names. Examples that print, `__main__` blocks and
drafts stay out. If no block defines the function, the answer is its body, and continues the prompt.
"""

import builtins
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from twellctl.evaluation.python_parts import (
    Part,
    dedented,
    first_parts,
    names_in,
    parts_of,
)
from twellctl.evaluation.written import Block, code_blocks
from twellctl.text.thinking import final_answer

_PYTHON = {"", "python", "python3", "python2", "py", "py3", "sage", "ipython", "ipython3"}
_BUILTINS = frozenset(dir(builtins))
_BY_TEXT = {"eval", "exec", "globals"}  # read names that only their texts hold
_BEGINNINGS = ("def ", "async def ", "class ", "@", "import ", "from ")
_MOST_LINES = 400  # of an answer in which code without fences is looked for
_UNITTEST = """import unittest as _unittest
_found = _unittest.TestResult()
_unittest.defaultTestLoader.loadTestsFromTestCase({name}).run(_found)
assert _found.testsRun and _found.wasSuccessful(), _found"""


def program(prompt: str, entry_point: str, tests: str, answer: str) -> str:
    """What runs the code of an `answer` against the tests; it need not be valid Python.

    `entry_point` names a function, or a method as `Class().method`.
    """
    name, answer = root_of(entry_point), final_answer(answer)
    given = frozenset(bound for part in _given(prompt, name) for bound in part.binds)
    code = _defining(answer, name, names_in(tests), given) or _continued(prompt, name, answer)
    if code is None:
        code = "\n".join(block.code for block in code_blocks(answer)) or answer
    return _joined(prompt, name, code, with_calls(tests, entry_point))


def stub(prompt: str, entry_point: str, tests: str) -> str:
    """The program of an answer that does nothing: sound tests fail it."""
    name = root_of(entry_point)
    code = f"def {name}(*args, **kwargs):\n    return None"
    if name != entry_point:
        code = (
            f"class {name}:\n    def __getattr__(self, name):\n        return lambda *a, **k: None"
        )
    return _joined(prompt, name, code, with_calls(tests, entry_point))


def root_of(entry_point: str) -> str:
    """`f` of "f", `Solution` of "Solution().f"."""
    return entry_point.partition("(")[0].partition(".")[0].strip()


def begins(prompt: str, entry_point: str) -> bool:
    """Whether a prompt is the beginning of the function, and wants all of it."""
    parts = _beginning(prompt)
    return parts is not None and _defines(parts, root_of(entry_point))


# ---- tests


def with_calls(tests: str, entry_point: str) -> str:
    """`tests`, with calls of what they define and never call: check(), test_*(), unittest's."""
    parts = parts_of(tests) or []
    calls = [call for part in parts for call in _calls_left_out(part, parts, entry_point)]
    return "\n".join([tests, *calls])


def _calls_left_out(part: Part, parts: Sequence[Part], entry_point: str) -> Iterator[str]:
    if not part.is_definition or any(part.binds & other.reads for other in parts):
        return
    (name,) = part.binds
    required = part.required_arguments
    if name == "check" and required == 1:
        yield f"check({entry_point})"
    elif name.startswith("test") and required == 0:
        yield f"{name}()"
    elif any("TestCase" in base for base in part.bases):
        yield _UNITTEST.format(name=name)


def tests_nothing(tests: str, entry_point: str) -> bool:
    """Whether no statement that is run reads the function."""
    parts = parts_of(with_calls(tests, entry_point))
    if parts is None:
        return False  # no Python, so that every answer fails
    reached = _reached(parts, frozenset(n for p in parts if not p.is_definition for n in p.reads))
    return root_of(entry_point) not in reached


def _reached(parts: Iterable[Part], names: frozenset[str]) -> frozenset[str]:
    """`names`, with all names that the statements which bind them read, and so on."""
    parts = list(parts)
    while True:
        more = names.union(*(part.reads for part in parts if part.binds & names))
        if more == names:
            return names
        names = more


# ---- what the prompt gives


def _given(prompt: str, name: str) -> list[Part]:
    """What a prompt defines besides the function `name`: imports, helpers, constants."""
    parts = _beginning(prompt)
    if parts is None:
        in_blocks = (_beginning(block.code) or [] for block in _python_blocks(prompt))
        parts = [part for found in in_blocks for part in found]
    return [part for part in parts if name not in part.binds and not part.is_example]


def _beginning(code: str) -> list[Part] | None:
    """The statements of code that may end with the head of a function; None for prose."""
    lines = code.rstrip().splitlines()
    indent = len(lines[-1]) - len(lines[-1].lstrip()) if lines else 0
    for ending in ("", f"\n{' ' * (indent + 4)}pass"):
        parts = parts_of(code.rstrip() + ending)
        if parts is not None and any(p.is_definition or p.is_import for p in parts):
            return parts
    return None


# ---- which code of an answer


def _is_python(block: Block) -> bool:
    return block.label in _PYTHON


def _python_blocks(text: str) -> list[Block]:
    return list(filter(_is_python, code_blocks(text)))


def _defining(answer: str, name: str, tested: frozenset[str], given: frozenset[str]) -> str | None:
    """The code of an answer that defines `name`, with what that needs; None if none does.

    The tests read the names `tested`, and the prompt binds those of `given`.
    """
    found_in_blocks = [(block, first_parts(dedented(block.code))) for block in code_blocks(answer)]
    other = [parts for block, parts in found_in_blocks if not _is_python(block)]
    places = [_in_order(answer, found_in_blocks, name), other, [_between_prose(answer)]]
    for in_full in (True, False):  # a stub only where there is nothing else
        for blocks in places:
            found = [i for i, parts in enumerate(blocks) if _defines(parts, name, in_full)]
            if found:
                own = blocks.pop(found[-1])
                others = [part for parts in blocks for part in parts]
                needed = _needed(others, own, name, tested, given)
                return _source_of(sorted(needed, key=lambda part: not part.is_future))
    return None


def _in_order(
    answer: str, blocks: Sequence[tuple[Block, list[Part]]], name: str
) -> list[list[Part]]:
    """The statements of each Python block, and of the text before, between and after fences.

    Indented blocks count if they define `name`; others may be the body of a function.
    """
    lines = answer.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # as Markdown has them
    found: list[list[Part]] = []
    indented: list[list[Part]] = []
    end = 0
    for block, parts in blocks:
        if block.lines is None:
            indented += [parts] if _defines(parts, name) else []
            continue
        found += indented or [_between_prose("\n".join(lines[end : block.lines[0]]))]
        found += [parts] if _is_python(block) else []
        indented, end = [], block.lines[1]
    return found + (indented or [_between_prose("\n".join(lines[end:]))])


def _defines(parts: Iterable[Part], name: str, in_full: bool = False) -> bool:
    return any(
        name in part.binds and not part.is_import and not (in_full and part.is_stub)
        for part in parts
    )


def _needed(
    others: list[Part], own: list[Part], name: str, tested: frozenset[str], given: frozenset[str]
) -> list[Part]:
    """The statements that `name` and the tests need, those of its `own` block last."""
    if _defines(own, name, in_full=True):
        own = [part for part in own if not (name in part.binds and part.is_stub)]
    others = [part for part in others if part.binds and name not in part.binds]
    pool = [p for p in [*others, *own] if not p.is_example and not _calls_it(p, name)]
    known = _BUILTINS.union(given, *(part.binds for part in pool))
    # as a limit of recursion that is set, or a table that is filled
    setups = [part for part in pool if part.is_setup and part.reads <= known]
    wanted = _reached(pool, tested.union({name}, *(part.reads for part in setups)))
    if wanted & _BY_TEXT:
        return pool
    return [
        part
        for part in pool
        if part in setups or part.binds & wanted or part.is_future or "*" in part.binds
    ]


def _calls_it(part: Part, name: str) -> bool:
    """Whether it is an example: it uses the function, and neither defines nor changes anything."""
    return name in part.reads and not part.is_definition and not part.is_assignment


def _between_prose(answer: str) -> list[Part]:
    """Statements of an answer that is code, or has code without fences, or with broken ones."""
    if (whole := parts_of(answer)) is not None:
        return whole
    lines = [line for line in answer.splitlines() if not line.lstrip().startswith(("```", "~~~"))]
    lines, parts, start = lines[:_MOST_LINES], list[Part](), 0
    while start < len(lines):
        found: list[Part] = []
        if (begun := lines[start].lstrip()).startswith(_BEGINNINGS):
            found = first_parts(_indented_by(lines[start][: -len(begun)], lines[start:]))
        parts += found
        start += max(1, found[-1].last_line if found else 1)
    return parts


def _indented_by(indent: str, lines: Sequence[str]) -> str:
    """As many of the first lines as are indented so, or empty, without that."""
    own = takewhile(lambda line: line.startswith(indent) or not line.strip(), lines)
    return "\n".join(line.removeprefix(indent) for line in own)


def _continued(prompt: str, name: str, answer: str) -> str | None:
    """The function `name` of the prompt, with a body that the answer holds; None if none fits."""
    head = prompt.rstrip()
    if not begins(prompt, name):
        return None
    for body in [block.code for block in code_blocks(answer)] or [answer]:
        for text in (body, _indented(body), f"    {body.lstrip()}"):
            parts = first_parts(f"{head}\n{text}", least=head.count("\n") + 2)
            if _defines(parts, name, in_full=True):
                return _source_of(parts)
    return None


def _indented(body: str) -> str:
    return "\n".join(f"    {line}" for line in dedented(body).splitlines())


def _source_of(parts: Iterable[Part]) -> str:
    return "\n".join(part.source for part in parts)


def _joined(prompt: str, name: str, code: str, tests: str) -> str:
    """One module, with imports from `__future__` at its top."""
    given, parts = _given(prompt, name), parts_of(code)
    future = [part for part in [*given, *(parts or [])] if part.is_future]
    own = code if parts is None else _source_of(p for p in parts if not p.is_future)
    before = _source_of([*future, *(part for part in given if not part.is_future)])
    return f"{before}\n{own}\n\n{tests}\n"
