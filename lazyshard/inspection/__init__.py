"""What a stream and its runs are like: facts, then verdicts. Changes nothing.

- `survey`, `outlook`: how a stream is, for `lazyshard status` and `watch`
- `inspection` with `row_facts`: what is in it, how it came to be, and what to change
- `verification` with `verification_files`: is all as it was published
- `tracing` with `tracing_*`: what was trained when; `auditing` with `auditing_counts`: was everything trained once
"""
