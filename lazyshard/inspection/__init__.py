"""What a stream and its runs are like: facts, then verdicts. Changes nothing.

- `survey`, `disk_use`, `outlook`, `band`: how a stream is, for `lazyshard status` and `watch`
- `inspection` with `inspection_*`, `row_facts`, `row_costs`: what is in it; `report_*`: what a report tells of it
- `verification` with `verification_*`: is all as it was published
- `tracing` with `tracing_*`: what was trained when; `auditing` with `auditing_counts`: was everything trained once
"""
