"""The SVG of picture.py: one prompt, two answers to it at one moment, and their speeds."""

import unicodedata
from collections import Counter
from html import escape
from itertools import groupby
from statistics import median
from typing import Any

from twellctl.bench.exact_results import EXACT, ORIGINAL
from twellctl.errors import TwellError, counted

Answer = dict[str, Any]  # tokens_per_second, and tokens: of each id, text, ms, draft
WIDTH, HEIGHT, MARGIN, GAP = 1160, 600, 32, 36  # pixels, as are all sizes
COLUMN = (WIDTH - 2 * MARGIN - GAP) // 2
CODE, LEADING, ADVANCE = 15, 19, 9.0  # of the answers: size, from line to line, of a character
LINE, LINES = int(COLUMN / ADVANCE), 17  # characters of a line, lines
PROMPT = 110  # characters
SANS = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def drawn(found: dict[str, Any], kind: str) -> str:
    """The SVG of what was recorded of a prompt of this `kind`; `TwellError` if there is none."""
    row, gains = _middling(found, kind)
    original, exact = (row["forms"][name] for name in (ORIGINAL, EXACT))
    moment, differs = exact["tokens"][-1]["ms"], _differs(row)
    second = MARGIN + COLUMN + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img">',
            f"<title>{_written(found['original'])}, by itself and with --exact</title>",
            _style(),
            f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
            _text(MARGIN, 42, "Prompt", "faint"),
            _text(MARGIN + 72, 42, _one_line(row["prompt"])),
            *_column(MARGIN, "the original", original, moment, differs),
            *_column(second, "the original with --exact", exact, moment, None),
            *_footer(found, row, gains),
            "</svg>\n",
        ]
    )


def _middling(found: dict[str, Any], kind: str) -> tuple[dict[str, Any], list[float]]:
    """The prompt whose gain is next to the median, and the gains of all. A prompt is preferred of
    which the original's fastest form writes the same text as `--exact`."""
    rows = [row for row in found["prompts"] if row["kind"] == kind]
    if not rows:
        kinds = ", ".join(sorted({str(row["kind"]) for row in found["prompts"]}))
        raise TwellError(f"no prompt is of kind {kind}: there are {kinds}")
    if not all(row["exact_is_stable"] for row in rows):
        raise TwellError(f"an answer to a prompt of kind {kind} is not the stable original's")
    gains = [_gain(row) for row in rows]
    alike = [row for row in rows if _differs(row) is None]
    return min(alike or rows, key=lambda row: abs(_gain(row) - median(gains))), gains


def _gain(row: dict[str, Any]) -> float:
    exact, original = (row["forms"][name]["tokens_per_second"] for name in (EXACT, ORIGINAL))
    return exact / original


def _differs(row: dict[str, Any]) -> int | None:
    return same_tokens(row["forms"][EXACT], row["forms"][ORIGINAL])


def _style() -> str:
    """Two sets of colours, those of our plots, of which the reader's browser takes one."""
    # matplotlib, which picture.py needs for this alone
    from twellctl.report.plot_style import DARK, FAINT, GRID, GROUND, INK, SERIES

    light = {"ground": GROUND, "rail": GRID, "faint": FAINT, "kept": SERIES[0]}
    light |= {"differs": SERIES[1], "text": INK}

    def rules(colors: dict[str, str]) -> str:
        return "\n".join(f".{name} {{ fill: {color} }}" for name, color in colors.items())

    dark = rules({name: DARK[color] for name, color in light.items()})
    return f"""<style>
text {{ font: 16px {SANS}; white-space: pre }}
.name {{ font-weight: bold }}
.rate {{ font: bold 52px {SANS} }}
.unit {{ font: 20px {SANS} }}
.clock {{ font: bold 28px {SANS} }}
.code {{ font: {CODE}px {MONO} }}
.right {{ text-anchor: end }}
.tint {{ opacity: 0.25 }}
{rules(light)}
@media (prefers-color-scheme: dark) {{
{dark}
}}
</style>"""


def _written(text: str) -> str:
    """In XML; what others wrote stays text, and is read in the order that it has."""
    return escape("".join(each if each.isprintable() else "\ufffd" for each in text))


def _text(x: float, y: float, content: str, looks: str = "", more: str = "") -> str:
    """`looks`: classes of the style."""
    color = "" if "faint" in looks else "text "
    return f'<text x="{x}" y="{y}" class="{color}{looks}"{more}>{_written(content)}</text>'


def _rect(x: float, y: float, width: float, height: float, looks: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" class="{looks}"/>'


def _column(x: int, name: str, answer: Answer, moment: float, differs: int | None) -> list[str]:
    """What of `answer` was there at the `moment`, and its speed; tokens from number `differs` on
    are marked."""
    tokens, right = answer["tokens"], x + COLUMN
    shown = [token for token in tokens if token["ms"] <= moment]
    rate, is_through = f"{answer['tokens_per_second']:,.0f}", len(shown) == len(tokens)
    so_far = "all" if is_through else f"{len(shown)} of"
    return [
        _text(x, 86, name, "name"),
        _text(right, 86, f"through at {tokens[-1]['ms']:.0f} ms", "faint right"),
        f'<text x="{x}" y="144" class="text rate">{rate}'
        '<tspan class="unit" dx="10">tokens/s</tspan></text>',
        _text(right, 120, f"{moment:.0f} ms", "clock right"),
        _text(right, 144, f"{so_far} {counted(len(tokens), 'token')}", "faint right"),
        _rect(x, 156, COLUMN, 6, "rail"),
        _rect(x, 156, COLUMN * len(shown) / len(tokens), 6, "text"),
        *_answer_lines(x, 188, shown, differs, is_through),
    ]


def _answer_lines(
    x: int, y: int, tokens: list[dict[str, Any]], differs: int | None, is_through: bool
) -> list[str]:
    """Tints, and the text over them; with a cursor unless it `is_through`."""
    lines = _lines(tokens, differs)
    if not is_through:
        lines[-1].append(("▍", ""))
    made = []
    for number, line in enumerate(lines[:LINES]):
        base, place = y + number * LEADING, 0
        for mark, cells in groupby(line, key=lambda cell: cell[1]):
            count = len(list(cells))
            if mark:
                left, width = x + place * ADVANCE, count * ADVANCE
                made.append(_rect(left, base - 14, width, LEADING, f"{mark} tint"))
            place += count
        written = "".join(character for character, _ in line)
        # whatever font there is, characters stay on their tints
        how = f' textLength="{place * ADVANCE:.1f}" xml:space="preserve"'
        made += [_text(x, base, written, "code", how)] if written.strip() else []
    if (more := len(lines) - LINES) > 0:
        made.append(_text(x, y + LINES * LEADING, f"… {counted(more, 'more line')}", "faint"))
    return made


def _lines(tokens: list[dict[str, Any]], differs: int | None) -> list[list[tuple[str, str]]]:
    """Of each line its places: a character and how it is marked. A wide character has two places,
    the second one empty."""
    lines: list[list[tuple[str, str]]] = [[]]
    for number, token in enumerate(tokens):
        mark = "kept" if token["draft"] else ""
        if differs is not None and number >= differs:
            mark = "differs"
        for character in token["text"].replace("\t", "    "):
            if character == "\n":
                lines.append([])
                continue
            if len(lines[-1]) >= LINE:
                lines.append([])
            lines[-1].append((character, mark))
            if unicodedata.east_asian_width(character) in "WF":
                lines[-1].append(("", mark))
    return lines


def _one_line(prompt: str) -> str:
    """The beginning of its first line."""
    first, _, rest = prompt.strip().partition("\n")
    shown = first[:PROMPT].rstrip()
    return f"{shown} …" if rest or len(first) > PROMPT else shown


def _footer(found: dict[str, Any], row: dict[str, Any], gains: list[float]) -> list[str]:
    tokens = row["forms"][EXACT]["tokens"]
    kept = Counter(token["draft"] for token in tokens if token["draft"])
    looked_up = kept.pop("lookup", 0)
    drafts = f"kept: {looked_up} copied from the text, {kept.total()} {found['drafted']}"
    gain = f"{_gain(row):.1f}x as fast"
    if len(gains) > 1:
        spread = f"{min(gains):.1f}x to {max(gains):.1f}x, median {median(gains):.1f}x"
        gain += f"; over {len(gains)} such prompts {spread}"
    same = "Every token is the same."
    if (differs := _differs(row)) is not None:
        same = f"Same up to token {differs}, then marked."
    where = (
        f"{found['original']}, one {found['device']}, one greedy sequence, "
        f"timed from the first token. {same}"
    )
    return [
        _rect(MARGIN, HEIGHT - 64, 20, 18, "kept tint"),
        _text(MARGIN + 30, HEIGHT - 50, drafts, "faint"),
        _text(MARGIN + COLUMN + GAP, HEIGHT - 50, gain, "faint"),
        _text(MARGIN, HEIGHT - 22, where),
    ]


def same_tokens(one: Answer, other: Answer) -> int | None:
    """How many tokens are the same before the first that differs; None: all are."""
    ids, others = ([token["id"] for token in answer["tokens"]] for answer in (one, other))
    if ids == others:
        return None
    pairs = enumerate(zip(ids, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(ids), len(others)))
