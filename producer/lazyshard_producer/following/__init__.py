"""Followed directories, into which other programs write, as sources of rows that may never end: see `directory`."""
