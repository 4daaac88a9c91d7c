"""Reports on a stream and its runs: facts, then verdicts. Changes nothing."""
