"""Python code as the statements at its top level: what each one binds, reads and does.

Read by `ast` and `symtable`, so that names within functions and texts are not confused with those
of the module.
"""

import ast
import contextlib
import symtable
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_TRIED = 100  # lines from which code is cut
_EXAMPLES = frozenset({"print", "input", "exit", "quit", "main", "testmod", "open"})


@dataclass(frozen=True)
class Part:
    """A statement: its `source`, and the names of the module that it binds and reads."""

    node: ast.stmt
    source: str
    binds: frozenset[str]
    reads: frozenset[str]

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, ast.Import | ast.ImportFrom)

    @property
    def is_future(self) -> bool:
        """Whether it is an import from `__future__`, which must come first."""
        return isinstance(self.node, ast.ImportFrom) and self.node.module == "__future__"

    @property
    def is_definition(self) -> bool:
        """Of a function or a class."""
        return isinstance(self.node, _DEFINITIONS)

    @property
    def required_arguments(self) -> int | None:
        """How many a function needs; None for what is no function."""
        if not isinstance(self.node, ast.FunctionDef):
            return None
        return len(self.node.args.args) - len(self.node.args.defaults)

    @property
    def bases(self) -> list[str]:
        """Those of a class, as they are written."""
        found = self.node.bases if isinstance(self.node, ast.ClassDef) else []
        return [ast.unparse(base) for base in found]

    @property
    def last_line(self) -> int:
        return self.node.end_lineno or self.node.lineno

    @property
    def is_stub(self) -> bool:
        """Whether it defines a function, or a class of functions, without a body."""
        return _is_stub(self.node)

    @property
    def is_example(self) -> bool:
        """Whether it prints, asks, ends the program, or belongs to `__main__`; or does nothing."""
        if self.is_definition:
            return False
        calls = (n.func for n in ast.walk(self.node) if isinstance(n, ast.Call))
        called = {getattr(func, "id", getattr(func, "attr", "")) for func in calls}
        return bool(called & _EXAMPLES) or "__name__" in self.reads or _is_nothing(self.node)

    @property
    def is_assignment(self) -> bool:
        return isinstance(self.node, ast.Assign | ast.AugAssign | ast.AnnAssign)

    @property
    def is_setup(self) -> bool:
        """Whether it is there for what it does, such as a call or a loop, and not for a name."""
        is_for_a_name = self.is_definition or self.is_import or self.is_assignment
        return not self.binds or not is_for_a_name


def parts_of(code: str) -> list[Part] | None:
    """The statements of `code`; None if it is no Python."""
    code = code.replace("\r\n", "\n").replace("\r", "\n")
    try:
        with _no_warnings():
            tree = ast.parse(code)
            compile(tree, "part", "exec")  # refuses a return outside of functions, for example
            return [_part(node, _source(node, code)) for node in tree.body]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def first_parts(code: str, least: int = 1) -> list[Part]:
    """The statements of as many of the first lines as are Python, `least` of them; or none.

    Where code is cut, what comes before is whole.
    """
    lines = code.splitlines()
    end = min(len(lines), _line_of_error(code) or len(lines))
    for stop in range(end, max(least, end - _TRIED) - 1, -1):
        if parts := parts_of("\n".join(lines[:stop])):
            return parts
    return []


def dedented(code: str) -> str:
    """`code`, without an indentation that makes it no Python."""
    return code if parts_of(code) is not None else textwrap.dedent(code)


def names_in(code: str) -> frozenset[str]:
    """All names of the module that `code` reads; none if it is no Python."""
    return frozenset(name for part in parts_of(code) or [] for name in part.reads)


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Code of others may have odd escapes and literals, of which Python warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _line_of_error(code: str) -> int | None:
    try:
        with _no_warnings():
            ast.parse(code)
    except SyntaxError as error:
        return error.lineno
    except (ValueError, RecursionError, MemoryError):
        return 0
    return None


def _part(node: ast.stmt, source: str) -> Part:
    table = symtable.symtable(source, "part", "exec")
    symbols = table.get_symbols()
    binds = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    binds |= {name for inner in _inner_tables(table) for name in _declared_global(inner)}
    if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
        binds.add("*")
    return Part(node, source, frozenset(binds), frozenset(_reads(table)))


def _reads(table: symtable.SymbolTable) -> Iterator[str]:
    yield from (s.get_name() for s in table.get_symbols() if s.is_referenced())
    for inner in _inner_tables(table):
        yield from (
            s.get_name() for s in inner.get_symbols() if s.is_referenced() and s.is_global()
        )


def _declared_global(table: symtable.SymbolTable) -> Iterator[str]:
    yield from (s.get_name() for s in table.get_symbols() if s.is_declared_global())


def _inner_tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inner_tables(child)


def _source(node: ast.stmt, code: str) -> str:
    """The text of a statement, its decorators included."""
    if isinstance(node, _DEFINITIONS):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return "\n".join(code.split("\n")[first - 1 : node.end_lineno])
    return ast.get_source_segment(code, node) or ""


def _is_stub(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        inner = [one for one in node.body if isinstance(one, _FUNCTIONS)]
        return bool(inner) and all(map(_is_stub, inner))
    return isinstance(node, _FUNCTIONS) and all(map(_is_nothing, node.body))


def _is_nothing(node: ast.stmt) -> bool:
    """Whether a statement does nothing: `pass`, a text, `...`, or NotImplementedError."""
    if isinstance(node, ast.Raise):
        return node.exc is not None and "NotImplemented" in ast.unparse(node.exc)
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Pass) or is_constant
