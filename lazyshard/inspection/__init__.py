"""What a stream and its runs are like: facts, then verdicts. Changes nothing.

- `census`, `disk_use`, `survey`, `growth`, `outlook`: how a stream is, for `lazyshard status`
- `inspection` with `inspection_balance`, `lengths`, `row_costs`, `row_keys`: what is in it
- `verification` with `verification_*`: is all as it was published
- `tracing` with `tracing_*`: what was trained when; `auditing` with `auditing_*`: was everything trained once
- `report_facts` with `report_*`: all that a report tells of a stream; `token_weights`: weights of a blend
"""
