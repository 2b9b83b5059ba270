"""Pages of what was measured: one HTML file each, which loads nothing and needs no server.

Reading order: markup (elements, escaped), charts (numbers to SVG), page (the file), then what is
shown of a profile (of_profile) and of a run (of_run). Advice in words stands in advice.
"""
