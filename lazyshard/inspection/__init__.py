"""What a stream and its runs are like: facts, then verdicts. Changes nothing."""
