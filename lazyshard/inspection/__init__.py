"""What a stream and its runs are like: facts, then verdicts. Changes nothing.

- `census`, `disk_use`, `survey`, `growth`, `outlook`: how a stream is, for `lazyshard status`
- `inspection` with `lengths`, `row_keys`: what is in it; `advice`: what to change; `refusals`: rows that were refused
- `verification` with `verification_*`: is all as it was published
- `tracing` with `tracing_*`: what was trained when; `auditing` with `auditing_*`: was everything trained once
- `token_weights`: weights of a blend
"""
