"""Measures how long the rows of a stream are in tokens, in processes of its own. What `lazyshard measure` runs.

- `measuring`: which chunks are measured, and what becomes of the lengths; `pool`: the processes
- `process`: what each of them does; `measures`: how a row is measured
"""

from lazyshard.measure.measures import Measure
from lazyshard.measure.measuring import Measured, measure_stream

__all__ = ["Measure", "Measured", "measure_stream"]
