"""twellctl makes pretrained language models sparse, and fast because they are sparse.

Each command is a module with a plain function of its name: `from twellctl.convert import convert`.
"""

__version__ = "0.1.0"
