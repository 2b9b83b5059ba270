"""The parts of fine-tuning that a run is put together from."""
