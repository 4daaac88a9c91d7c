"""What is seen of a run: `progress` on the screen or in the log, `metrics` for Prometheus."""
