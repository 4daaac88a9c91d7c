"""Rows on their way from the sources to the stream.

- `pipeline`: from settings to a feed; `preview`: the same without publishing
- `mixing`, `turns`, `slot`, `standing`: the order of sources; `recipe`, `making`, `unit`, `workers`: rows made of rows
- `blocks`, `measure`: many rows shuffled or packed together
- `feed`, `book`: rows with their positions; `refusals`: rows that are none
"""
