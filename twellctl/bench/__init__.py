"""What `twellctl bench` measures: dense and TwELL by turns, in one run, on one device."""
