"""HTML elements: all text is escaped."""

from twellctl.report.notebook import element


def test_text_is_escaped():
    assert element('th scope="col"', 'a < b & "c"') == (
        '<th scope="col">a &lt; b &amp; &quot;c&quot;</th>'
    )
