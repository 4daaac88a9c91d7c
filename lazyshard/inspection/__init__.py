"""What a stream and its runs are like: facts, then verdicts. Changes nothing.

- `survey`, `disk_use`, `outlook`, `band`: how a stream is, for `lazyshard status` and `watch`
- `inspection` with `row_facts`: what is in it, and what to change; `history`: how it came to be
- `verification` with `verification_*`: is all as it was published
- `tracing` with `tracing_*`: what was trained when; `auditing` with `auditing_counts`: was everything trained once
"""
