"""Held back at limits, and deleting what nobody needs.

- `limits`: the decisions; `holdback`: carried out; `hold`, `hold_reasons`: why, as numbers and in words; `disk`: usage
"""
