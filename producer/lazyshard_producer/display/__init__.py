"""What is seen of a run while it goes on.

- `progress`, with `waits`, `recent`: a bar or a line a minute; `metrics`, with `figures`, `wait_clock`: Prometheus
"""
