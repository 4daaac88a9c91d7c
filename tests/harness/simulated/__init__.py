"""Real runs beside the predictions of `lazyshard simulate`: see `tests.harness.simulated.real`."""
