"""The settings of a run: from flags and a configuration file to one checked value."""
