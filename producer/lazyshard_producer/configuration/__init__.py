"""What a run is to do: from flags and a file to one checked value."""
