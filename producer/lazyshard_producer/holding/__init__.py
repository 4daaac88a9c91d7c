"""Held back at limits, and deleting what nobody needs.

- `limits`: the decisions, and in words why; `holdback`: carried out; `shelf`: where the chunks lie, and what they take
"""
