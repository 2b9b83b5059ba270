"""This machine and this installation: libraries, driver, caches, twellctl's own files."""
