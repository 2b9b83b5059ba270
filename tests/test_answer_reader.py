"""What a model's answer is taken for: thinking, blocks of code, numbers; and the programs of it."""

import os
import random

import pytest

from twellctl.evaluation import programs
from twellctl.evaluation.questions import Asked, Coded, matches, right
from twellctl.evaluation.written import answer_number, code_blocks
from twellctl.text.thinking import final_answer, leaves_thinking_open

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
SUM = Coded("Write a function add(a, b) that returns the sum.", "add", "assert add(1, 2) == 3")
DOUBLE = 'def double(x):\n    """Twice x."""\n    return 2 * x\n\n\n'
HALVE = DOUBLE + 'def halve(x):\n    """Undo double.\n    >>> halve(double(3))\n    3\n    """\n'
UNDO = Coded(HALVE, "halve", "assert halve(double(3)) == 3")
SORTED = "```python\ndef f(xs):\n    return sorted(set(xs))\n```"
UNIQUE = "assert f([2, 1, 2]) == [1, 2]"


def fence(code: str, label: str = "python") -> str:
    return f"```{label}\n{code}```"


def as_item(code: str) -> str:
    """In an item of a numbered list."""
    lines = "\n".join(f"   {line}" for line in fence(code).split("\n"))
    return f"1. First:\n\n{lines}\n\n2. Done."


STAR, FUTURE = "from typing import *\n", "from __future__ import annotations\n"
# (why, question, answer, whether it is right)
CODE = [
    ("a label in capitals", SUM, f"Here:\n\n{fence(ADD, 'Python')}\nIt adds.", True),
    ("python3", SUM, fence(ADD, "python3"), True),
    ("py3", SUM, fence(ADD, "py3"), True),
    ("no label", SUM, fence(ADD, ""), True),
    ("a space before the label", SUM, fence(ADD, " python"), True),
    ("attributes", SUM, fence(ADD, 'python title="add.py"'), True),
    ("Pandoc's label", SUM, fence(ADD, "{.python}"), True),
    ("a label of another language", SUM, fence(ADD, "plaintext"), True),
    ("tildes", SUM, f"~~~python\n{ADD}~~~", True),
    ("four backticks", SUM, f"````python\n{ADD}````", True),
    ("not closed", SUM, f"```python\n{ADD}", True),
    ("line ends of Windows", SUM, fence(ADD).replace("\n", "\r\n"), True),
    ("in a list", SUM, as_item(ADD), True),
    ("in a list, the code not indented", SUM, f"- So:\n  ```python\n{ADD}  ```\n", True),
    ("in a quotation", SUM, "".join(f"> {line}\n" for line in fence(ADD).split("\n")), True),
    ("indented code", SUM, "So:\n\n    def add(a, b):\n        return a + b\n\nDone.", True),
    ("no fence", SUM, ADD, True),
    ("no fence, between prose", SUM, f"Here it is:\n\n{ADD}\nIt adds both.", True),
    ("a bash block first", SUM, f"{fence('pip list', 'bash')}\n\n{fence(ADD)}", True),
    ("a text block first", SUM, f"{fence('add(1, 2) -> 3', 'text')}\n\n{fence(ADD)}", True),
    ("a JSON block first", SUM, f"{fence('[1, 2]', 'json')}\n\n{fence(ADD)}", True),
    ("output last", SUM, f"{fence(ADD)}\n\n{fence('3', '')}", True),
    (
        "a longer name first",
        SUM,
        f"{fence('def add_all(xs):' + chr(10) + '    return sum(xs)' + chr(10))}\n{fence(ADD)}",
        True,
    ),
    (
        "a helper in a block of its own",
        SUM,
        fence("def same(x):\n    return x\n")
        + "\n\n"
        + fence("def add(a, b):\n    return same(a) + same(b)\n"),
        True,
    ),
    (
        "a helper in a later block",
        SUM,
        fence("def add(a, b):\n    return same(a) + same(b)\n")
        + "\n\nwith\n\n"
        + fence("def same(x):\n    return x\n"),
        True,
    ),
    ("a stub first", SUM, f"{fence('def add(a, b): ...' + chr(10))}\n{fence(ADD)}", True),
    ("a stub last", SUM, f"{fence(ADD)}\n{fence('def add(a, b): pass' + chr(10))}", True),
    ("a stub and the real thing in one", SUM, fence(f"def add(a, b):\n    ...\n\n{ADD}"), True),
    ("corrected", SUM, f"{fence(WRONG)}\nThat subtracts. Instead:\n{fence(ADD)}", True),
    ("corrected without a fence", SUM, f"{fence(WRONG)}\nInstead:\n\n{ADD}\nIt adds.", True),
    ("corrected between fences", SUM, f"{fence(WRONG)}\n{ADD}\n{fence('3', 'text')}", True),
    (
        "a body that looks like an indented block",
        SUM,
        "def add(a, b):\n    import math\n\n    def up(x):\n        return math.ceil(x)\n"
        f"    k = 3\n    while k:\n        k -= up(1)\n    return a + b\n\n{fence('3', 'text')}",
        True,
    ),
    (
        "indented after a list",
        SUM,
        "1. So\n\n    def add(a, b):\n        return a + b\n\nAnd:",
        True,
    ),
    ("an import before one from __future__", SUM, f"{fence(STAR)}\n{fence(FUTURE + ADD)}", True),
    ("spoilt", SUM, f"{fence(ADD)}\nBetter:\n{fence(WRONG)}", False),
    ("only a stub", SUM, fence("def add(a, b):\n    raise NotImplementedError\n"), False),
    ("wrong", SUM, fence(WRONG), False),
    ("no code", SUM, "I cannot.", False),
    ("empty", SUM, "", False),
    ("another name", SUM, fence("def plus(a, b):\n    return a + b\n"), False),
    ("a lambda", SUM, fence("add = lambda a, b: a + b\n"), True),
    ("decorated", SUM, fence(f"import functools\n\n@functools.cache\n{ADD}"), True),
    ("wrapped afterwards", SUM, fence(f"import copy\n{ADD}add = copy.copy(add)\n"), True),
    ("an attribute of it", SUM, fence(f"{ADD.replace('+ b', '+ b + add.n')}add.n = 0\n"), True),
    ("cut in an example", SUM, f"```python\n{ADD}\nprint(add(1,", True),
    ("an example that asks", SUM, fence(f"{ADD}\nx = int(input())\nprint(add(x, x))\n"), True),
    ("an example that is wrong", SUM, fence(f"{ADD}\nassert add(1, 1) == 3\n"), True),
    ("a limit of recursion", SUM, fence(f"import sys\nsys.setrecursionlimit(5000)\n{ADD}"), True),
    ("from __future__", SUM, fence(f"from __future__ import annotations\n\n{ADD}"), True),
    ("input() in __main__", SUM, fence(f'{ADD}\nif __name__ == "__main__":\n    input()\n'), True),
    (
        "exit in __main__",
        SUM,
        fence(f"import sys\n{ADD}\nif __name__ == '__main__':\n    sys.exit(0)\n"),
        True,
    ),
    ("unittest.main()", SUM, fence(f"import unittest\n{ADD}\nunittest.main()\n"), True),
    (
        "a table that code fills",
        Coded("Write f.", "f", "assert f(3) == 9"),
        fence(
            "table = {}\nfor i in range(5):\n    table[i] = i * i\n\n"
            "def f(x):\n    return table[x]\n"
        ),
        True,
    ),
    ("a draft in thinking", SUM, f"<think>\n{fence(WRONG)}\nNo.\n</think>\n\n{fence(ADD)}", True),
    ("only the draft is right", SUM, f"<think>\n{fence(ADD)}\n</think>\n\n{fence(WRONG)}", False),
    ("thinking that was cut", SUM, f"<think>\nMaybe\n{fence(ADD)}\nLet me check 1 + 2", False),
    ("thinking without its beginning", SUM, f"{fence(WRONG)}\n</think>\n{fence(ADD)}", True),
    ("the prompt's helper in tests", UNDO, fence("def halve(x):\n    return x // 2\n"), True),
    (
        "the prompt's helper in the answer",
        Coded(DOUBLE + 'def four(x):\n    """4 x."""\n', "four", "assert four(2) == 8"),
        fence("def four(x):\n    return double(double(x))\n"),
        True,
    ),
    (
        "the prompt's constant",
        Coded('N = 1\n\ndef f(xs):\n    """N of them."""\n', "f", "assert f([1, 2, 3]) == [1]"),
        fence("def f(xs):\n    return xs[:N]\n"),
        True,
    ),
    (
        "the prompt's import in brackets",
        Coded(
            'from typing import (\n    List,\n)\n\ndef f(xs: List[int]):\n    """Sort."""\n',
            "f",
            UNIQUE,
        ),
        fence("def f(xs: List[int]):\n    return sorted(set(xs))\n"),
        True,
    ),
    (
        "the prompt's code in a fence",
        Coded(f"Do:\n```python\nimport math\n{DOUBLE}def f(x):\n```", "f", "assert f(4) == 4"),
        fence("def f(x):\n    return double(math.sqrt(x))\n"),
        True,
    ),
    ("prose with 'from'", Coded("Sort\nfrom a list.", "f", UNIQUE), SORTED, True),
    ("prose with 'import'", Coded("Write f.\nimport nothing else.", "f", UNIQUE), SORTED, True),
    (
        "a docstring with 'from'",
        Coded('def f(xs):\n    """Sorted\n\nfrom the list.\n    """\n', "f", UNIQUE),
        SORTED,
        True,
    ),
    ("a body", UNDO, "    return x // 2\n", True),
    ("a body, not indented", UNDO, "return x // 2", True),
    ("a body in a fence", UNDO, fence("    return x // 2\n"), True),
    ("a body and prose", UNDO, "    return x // 2\n\nThis divides by 2.", True),
    (
        "a body whose first line is not indented",
        UNDO,
        "if x:\n        return x // 2\n    return 0\n",
        True,
    ),
    (
        "a body below an import in the function",
        Coded("def f(x):\n    import math\n    '''Root.'''\n", "f", "assert f(4) == 2"),
        "    return math.sqrt(x)\n",
        True,
    ),
    ("a body that is wrong", UNDO, "    return x\n", False),
    (
        "a method",
        Coded(
            "class Solution:\n    def f(self, xs):\n",
            "Solution().f",
            f"f = Solution().f\n{UNIQUE}",
        ),
        fence("class Solution:\n    def f(self, xs):\n        return sorted(set(xs))\n"),
        True,
    ),
    (
        "check() that nobody calls",
        Coded("Write f.", "f", "def check(candidate):\n    assert candidate() == 1\n"),
        fence("def f():\n    return 1\n"),
        True,
    ),
    (
        "check() that nobody calls, and an answer that is wrong",
        Coded("Write f.", "f", "def check(candidate):\n    assert candidate() == 1\n"),
        fence("def f():\n    return None\n"),
        False,
    ),
    (
        "a function of pytest",
        Coded("Write f.", "f", f"def test_f():\n    {UNIQUE}\n"),
        fence("def f(xs):\n    return None\n"),
        False,
    ),
    (
        "a class of unittest",
        Coded(
            "Write f.",
            "f",
            "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        "
            "self.assertEqual(f(1), 2)\n",
        ),
        fence("def f(x):\n    return None\n"),
        False,
    ),
    (
        "a class of unittest, and an answer that is right",
        Coded(
            "Write f.",
            "f",
            "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        "
            "self.assertEqual(f(1), 2)\n",
        ),
        fence("def f(x):\n    return 2\n"),
        True,
    ),
    ("tests are comments", Coded("f", "f", "# assert f() == 1"), fence("def f(): 1\n"), False),
]


@pytest.mark.usefixtures("limits_programs")
def test_code_is_judged_as_a_reader_would():
    found = right([question for _, question, _, _ in CODE], [answer for *_, answer, _ in CODE])
    expected = {why: float(is_right) for why, _, _, is_right in CODE}
    assert dict(zip(expected, found, strict=True)) == expected


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("yes", "yes"),
        ("<think>no</think>yes", "yes"),
        ("no\n</think>\nyes", "\nyes"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>cut", ""),
        ("\n <thinking>cut", ""),
        ("[THINK]no[/THINK]yes", "yes"),
        ("Write <think> in front.", "Write <think> in front."),
    ],
)
def test_an_answer_is_what_follows_thinking(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|assistant|>", False),
        ("<|assistant|><think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("Use <think> tags.<|assistant|>", False),
    ],
)
def test_a_template_may_begin_the_thinking(prompt, is_open):
    assert leaves_thinking_open(prompt) == is_open


def test_blocks_have_labels():
    text = "```Python\na\n```\n~~~ {.py #x}\nb\n~~~\n* c\n\n  ```js\n  d\n  ```\n\n```\ne"
    assert [(block.label, block.code) for block in code_blocks(text)] == [
        ("python", "a\n"),
        ("py", "b\n"),
        ("js", "d\n"),
        ("", "e"),
    ]


@pytest.mark.parametrize(
    ("match", "answer", "text", "is_right"),
    [
        ("exact", "yes", " yes\n", True),
        ("exact", "yes", "yes.", False),
        ("exact", "yes", "<think>\nIt is even.\n</think>\n\nyes", True),
        ("contains", "Paris", "The capital is Paris.", True),
        ("contains", "Paris", "paris", False),
        ("contains", "Paris", "<think>Paris?</think>London", False),
        ("regex", r"^[Aa]\b", "a) because", True),
        ("regex", r"^[Aa]\b", "all", False),
        ("regex", r"^(\w+\s?)*$", "word" * 18 + "!", False),  # re takes ages
        ("number", "1,200", "It is 7 times 3, so 1200.", True),
        ("number", "4", "None.", False),
        ("number", "72", "<think>\nFirst guess 72", False),
        # signs
        ("number", "-0.5", "x = -0.50", True),
        ("number", "-0.5", "x = 0.50", False),
        ("number", "0.5", "x = -0.50", False),
        ("number", "-7", "It is \N{MINUS SIGN}7.", True),
        ("number", "5", "between 3-5", True),
        ("number", "-3", "from -5 to -3", True),
        ("number", "-3", "It costs -$3", True),
        # whole numbers are equal or not, others within a millionth
        ("number", "1234567", "1234568", False),
        ("number", "20240101", "20240109", False),
        ("number", "0.333333333", "0.33333333", True),
        ("number", "72", "72.0", True),
        # lists and separators
        ("number", "3", "The numbers are 1,2,3", True),
        ("number", "300", "100, 200, 300", True),
        ("number", "1234567", "It is 1,234,567.", True),
        ("number", "1234", "1{,}234", True),
        ("number", "1200", "It costs $1,200.", True),
        # exponents, fractions, percent, units
        ("number", "1500", "1.5e3", True),
        ("number", "2500", r"2.5 \times 10^{3}", True),
        ("number", "0.75", "3/4", True),
        ("number", "-1/2", r"-\frac{1}{2}", True),
        ("number", "50", "50%", True),
        ("number", "0.5", "50 %", True),
        ("number", "50%", "0.5", True),
        ("number", "50%", "5000%", False),
        ("number", "72", "72km", True),
        ("number", "9", "9" * 5000, False),
        # which of several is the answer
        ("number", "72", "\\boxed{72}\n\nStep 3 was the key.", True),
        ("number", "72", r"\boxed{\text{72 apples}}", True),
        ("number", "7", r"First \boxed{5}, then \boxed{3 + 4 = 7}.", True),
        ("number", "72", "#### 72\n\nQuestion: 5 apples", True),
        ("number", "9", "#### 1. First\nSo 5.\n#### 2. Second\nThe answer is 9", True),
        ("number", "72", "The answer is **72**, from 3 steps.", True),
        ("number", "72", "**Answer:** 72 (see 2 above)", True),
        ("number", "7", "The answer is 3 + 4 = 7", True),
        ("number", "15", "Answer: 5 kids with 3 apples each, so 15", True),
        ("number", "7", "The answer to question 2 is 7", True),
        ("number", "72", "The total is 72, altogether.", True),
    ],
)
def test_what_counts_as_right(match, answer, text, is_right):
    assert matches(Asked("?", answer, match), text) == is_right


def test_a_text_without_a_number_has_none():
    assert answer_number("x2 and v1.2.3") is None


def test_calls_are_added_once():
    tests = "def check(f):\n    assert f() == 1\n\ncheck(g)\n"
    assert programs.with_calls(tests, "g") == tests
    assert programs.with_calls("def check(f):\n    pass", "g").endswith("\ncheck(g)")


# ---- answers in random dress

LABELS = [
    "python",
    "Python",
    "py",
    "python3",
    "",
    " python",
    "{.python}",
    'python title="a"',
    "text",
]
PROSE = [
    "Sure!",
    "Here is the function:",
    "from the task, it follows:",
    "1. First we add.",
    "# Code",
]
EXAMPLES = [
    "",
    "\nprint(add(1, 2))",
    "\nassert add(1, 2) == 3",
    '\nif __name__ == "__main__":\n    import sys\n    sys.exit(add(1, 2))',
    "\nresult = add(int(input()), 2)",
]
HEADS = ["", "import math\n", "from __future__ import annotations\n", "from typing import List\n\n"]
BODIES = {
    "    return a + b": True,
    "    total = a\n    total += b\n    return total": True,
    "    def inner():\n        return a + b\n\n    return inner()": True,
    "    return a - b": False,
    "    print(a + b)": False,
}


def dressed(draw: random.Random) -> tuple[str, bool]:
    """(an answer to `SUM`, whether it is right)."""
    body, is_right = draw.choice(list(BODIES.items()))
    code = f"{draw.choice(HEADS)}def add(a, b):\n{body}{draw.choice(EXAMPLES)}\n"
    stub = draw.choice(["", "", "def add(a, b):\n    ...\n", "def add_all(xs): return sum(xs)\n"])
    parts = [draw.choice(PROSE)] if draw.random() < 0.8 else []
    if stub and draw.random() < 0.5:
        parts.append(fence(stub, draw.choice(LABELS)))
    elif stub:
        code = stub + code if not code.startswith("from __future__") else code
    parts.append(draw.choice([fence(code, draw.choice(LABELS)), as_item(code), code]))
    parts += draw.sample(["It adds both.", fence("3", "text"), fence("pip list", "bash")], 1)
    answer = "\n\n".join(parts)
    if draw.random() < 0.3:
        draft = draw.choice([ADD, WRONG])
        answer = f"<think>\nMaybe:\n{fence(draft)}\n</think>\n\n{answer}"
    return answer.replace("\n", draw.choice(["\n", "\n", "\r\n"])), is_right


def passes(source: str) -> bool:
    """Of a program that is ours, in this process."""
    try:
        exec(compile(source, "program", "exec"), {"__name__": "program"})
    except Exception:
        return False
    return True


def test_an_answer_is_judged_alike_in_every_dress():
    draw = random.Random(66)
    for _ in range(int(os.environ.get("TWELL_TEST_ANSWERS", "400"))):
        answer, is_right = dressed(draw)
        source = programs.program(SUM.prompt, SUM.entry_point, SUM.tests, answer)
        assert passes(source) == is_right, f"{answer}\n=====\n{source}"
