"""The page's Markdown: what it makes of a text, whole and as it comes, and of hostile text."""

import random

import pytest
from page_driver import Page
from serving_client import Scripted, running

from twellctl.serving.plan import ServedModel

pytest.importorskip("selenium", reason="selenium drives the browser")
SHOW = """
const show = (body, text, open) => showMarkdown(body, text, open, (parent, part, where) => {
  for (let i = 0; i < part.length; i++) {
    if (text[where[i]] !== part[i]) throw new Error(`${i} of ${part} is not at ${where[i]}`);
  }
  parent.append(part);
});
const told = (body) => body.innerHTML.replaceAll(' class=""', "")
  .replaceAll(' role="group" aria-label="code"', "").replaceAll(' role="group"', "");
const fresh = (text, open = false) => {
  const body = document.createElement("div");
  show(body, text, open);
  return told(body);
};
"""
LINK = 'target="_blank" rel="noopener noreferrer"'
CASES = {
    "plain": "<p>plain</p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "**bold** and *thin* and ***both***": (
        "<p><strong>bold</strong> and <em>thin</em> and <strong><em>both</em></strong></p>"
    ),
    "_thin_ but snake_case_name and __init__": (
        "<p><em>thin</em> but snake_case_name and __init__</p>"
    ),
    "2 * 3 * 4, a*b*c, **kwargs, 2**8": "<p>2 * 3 * 4, a*b*c, **kwargs, 2**8</p>",
    "这是**重点**内容": "<p>这是<strong>重点</strong>内容</p>",
    "`a*b*` and ``a ` b``": "<p><code>a*b*</code> and <code>a ` b</code></p>",
    r"\*as it is\* \d": r"<p>*as it is* \d</p>",
    "**bold with `code`**": "<p><strong>bold with <code>code</code></strong></p>",
    "# One\n## Two ##\n####### no": "<h3>One</h3><h4>Two</h4><p>####### no</p>",
    "#no": "<p>#no</p>",
    "- a\n- b\n  - c\n\n- d": (
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>"
    ),
    "3. a\n4. b\n\n   more\ntext": (
        '<ol start="3"><li><p>a</p></li><li><p>b</p><p>more</p></li></ol><p>text</p>'
    ),
    "1. a\n   ```\n   x\n     y\n   ```\n2. b": (
        '<ol start="1"><li><p>a</p><pre><code>x\n  y</code></pre></li><li><p>b</p></li></ol>'
    ),
    "- a\n1. b": '<ul><li><p>a</p></li></ul><ol start="1"><li><p>b</p></li></ol>',
    "```python\nif a:\n    b *= **c**\n\n# d\n```\nafter": (
        '<pre aria-label="code, python"><code>if a:\n    b *= **c**\n\n# d</code></pre><p>after</p>'
    ),
    "~~~\n```\n~~~": "<pre><code>```</code></pre>",
    "```\nnever closed": "<pre><code>never closed</code></pre>",
    "> said\n> twice\nnot": "<blockquote><p>said\ntwice</p></blockquote><p>not</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "[it](https://a.example/b_(c)?d=1#e)": (
        f'<p><a title="https://a.example/b_(c)?d=1#e" href="https://a.example/b_(c)?d=1#e" {LINK}>'
        "it</a></p>"
    ),
    "![**it**](HTTP://a.example)": (
        f'<p><a title="HTTP://a.example" href="HTTP://a.example" {LINK}><strong>it</strong></a></p>'
    ),
    "[it](javascript:alert(1))": '<p><span title="javascript:alert(1)">it</span></p>',
    "[it](data:text/html,x) [it](//a.example)": (
        '<p><span title="data:text/html,x">it</span> <span title="//a.example">it</span></p>'
    ),
    "[no] (link) [a](b": "<p>[no] (link) [a](b</p>",
    "<b>no</b> &amp; <img src=x>": "<p>&lt;b&gt;no&lt;/b&gt; &amp;amp; &lt;img src=x&gt;</p>",
    "": "",
    " \n\n": "",
}
BEGUN = {  # while more is to come
    "a **bol": "<p>a <strong>bol</strong></p>",
    "a **bold*": "<p>a <strong>bold</strong></p>",
    "a **": "<p>a </p>",
    "a `co": "<p>a <code>co</code></p>",
    "a\n```": "<p>a</p>",
    "```\ncode\n``": "<pre><code>code</code></pre>",
    "a\n\n-": "<p>a</p>",
    "a\n\n1.": "<p>a</p>",
    "- **a** and **b": ("<ul><li><p><strong>a</strong> and <strong>b</strong></p></li></ul>"),
    "2 * 3": "<p>2 * 3</p>",
}
BITS = (
    "word", " ", " ", "\n", "\n\n", "*", "**", "***", "_", "`", "``", "```", "\n```py\n", "\n```\n",
    "# ", "\n## ", "- ", "\n- ", "\n  - ", "\n1. ", "\n   ", "> ", "\n> ", "\n---\n", "[a](", ")",
    "[b](https://b.example)", "**c**", "*d*",
    "[", "]", "\\", "<b>", "\t", "日本", "🏳️‍🌈", "1.", "!", "~~~",
)  # fmt: skip
HOSTILE = ("*", "**", "* a", "_a ", "`", "` ``", "[", "![", "[a](", "[a](b(", "> ", "- ", "\n- ",
           "  - a\n", "1. ", "#", "\\", "\n```", "*a **b ", "\t", "[a](b)", "((", " ")  # fmt: skip


@pytest.fixture(scope="module")
def show(chromium, tokenizer):
    """`show(script, *arguments)`: what the script returns, which has `fresh`, `show` and `told`."""
    with running(ServedModel("model", tokenizer, Scripted([5]))) as client:
        page = Page(chromium, client)
        yield lambda script, *arguments: page.run(SHOW + script, *arguments)
        assert page.complaints() == []


def test_what_each_mark_becomes(show):
    made = show("return arguments[0].map((text) => fresh(text))", list(CASES))
    assert dict(zip(CASES, made, strict=True)) == CASES


def test_what_is_begun_is_shown_as_if_it_were_complete(show):
    made = show("return arguments[0].map((text) => fresh(text, true))", list(BEGUN))
    assert dict(zip(BEGUN, made, strict=True)) == BEGUN


def test_a_text_that_comes_in_pieces_ends_as_one_that_came_whole(show):
    draw = random.Random(0)
    texts = [[draw.choice(BITS) for _ in range(draw.randrange(1, 40))] for _ in range(300)]
    pairs = show(
        """return arguments[0].map((bits) => {
          const body = document.createElement("div");
          bits.forEach((_, i) => show(body, bits.slice(0, i + 1).join(""), true));
          show(body, bits.join(""), false);
          return [told(body), fresh(bits.join(""))];
        })""",
        texts,
    )
    for bits, (streamed, whole) in zip(texts, pairs, strict=True):
        assert streamed == whole, bits
    tags = {tag for tag in ("<pre", "<ul", "<ol", "<strong", "<em", "<a ", "<h3", "<blockquote")}
    assert all(any(tag in whole for _, whole in pairs) for tag in tags)


def test_a_block_of_code_is_named_for_who_cannot_see_it(show):
    labels = show(
        """const body = document.createElement("div");
        show(body, "```sql\\n```\\n~~~\\n~~~", false);
        return [...body.children].map((pre) => [pre.getAttribute("role"), pre.ariaLabel]);"""
    )
    assert labels == [["group", "code, sql"], ["group", "code"]]


def test_what_is_shown_stays_while_more_comes(show):
    kept = show(
        """const body = document.createElement("div");
        show(body, "a **b**\\n\\n```\\nx = 1\\n", true);
        const before = [body.children[0], body.children[1], body.querySelector("strong")];
        show(body, "a **b**\\n\\n```\\nx = 1\\ny = 2\\n```\\n\\nend", false);
        const after = [body.children[0], body.children[1], body.querySelector("strong")];
        return before.map((node, i) => node === after[i]);"""
    )
    assert kept == [True, True, True]


@pytest.mark.parametrize("bit", HOSTILE)
def test_hostile_text_takes_no_time_and_loses_nothing(show, bit):
    milliseconds, letters = show(
        """const began = performance.now();
        const body = document.createElement("div");
        show(body, arguments[0], true);
        show(body, arguments[0], false);
        return [performance.now() - began, body.textContent.split("Q").length - 1];""",
        bit * (19_000 // len(bit)) + "\nQ",
    )
    assert milliseconds < 1000
    assert letters == 1
