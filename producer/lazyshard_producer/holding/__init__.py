"""Held back at limits, and deleting what nobody needs."""
