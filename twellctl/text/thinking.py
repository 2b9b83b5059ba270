"""Where thinking begins and ends in what models write; the marks of several families."""

import re

_NAMES = ("<{}think>", "<{}thinking>", "<{}thought>", "<{}reasoning>", "[{}THINK]")
MARKS = tuple(name.format(slash) for name in _NAMES for slash in ("", "/"))
_MARK = re.compile("|".join(map(re.escape, MARKS)))


def end_of_thinking(text: str) -> int:
    """The place after the last mark that ends thinking; 0 if there is none."""
    return max((mark.end() for mark in _MARK.finditer(text) if _is_end(mark)), default=0)


def final_answer(text: str) -> str:
    """What follows the last end of thinking; "" if thinking was cut, so that there is no answer."""
    end = end_of_thinking(text)
    # without an end, marks within an answer are words of it
    return "" if not end and _MARK.match(text.lstrip()) else text[end:]


def leaves_thinking_open(prompt: str) -> bool:
    """Whether a chat template has begun the thinking, so that only its end is in the answer."""
    marks = list(_MARK.finditer(prompt))
    if not marks or _is_end(marks[-1]):
        return False
    return not prompt[marks[-1].end() :].strip()


def _is_end(mark: re.Match[str]) -> bool:
    return mark[0][1] == "/"
