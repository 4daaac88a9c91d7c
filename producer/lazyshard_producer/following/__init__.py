"""A directory into which other programs write, as a source of rows that may never end: `directory`."""
