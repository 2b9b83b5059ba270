"""HTML elements: all text is escaped."""

from twellctl.report.markup import escaped, tag


def test_markup_escapes_what_is_not_markup():
    assert tag("p", "a < b", tag("b", "&"), None, class_="x", title='"', id=None) == (
        '<p class="x" title="&quot;">a &lt; b<b>&amp;</b></p>'
    )
    assert escaped(escaped("<")) == "&lt;"
