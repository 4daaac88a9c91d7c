"""The only place of lazyshard that touches files.

- `durable`: the steps of a durable write; `lock`, `creation`, `recovery`, `writer_opening`: how a producer begins
- `writer`: what it writes with; of that `chunk_sequence`, `open_chunk`, `publishing`, `steps`: chunks;
  `announcer`, `rate`: the head; `writer_failure`, `dropped`: what goes wrong
- `files`, `chunk`, `listing`, `published`, `stream` with `native_stream` and `foreign_stream`, `pacing`, `watch`,
  `waiting`, `open_chunks`, `reader`: the readers' side; `scattered`: rows in any order;
  `places`: rows that another process has read; `shared_looks`, `node_file`: waiting processes of one node look together
- `urls`: is it a directory or a URL; `objects`, `objects_calls`, `objects_failures`: what a store holds; `mirror` with
  `mirror_*`: its chunks, copied to this node
- `kept_samples`, with `kept_file`, `kept_room`: encoded samples, kept on this node for all of its processes
- `cursor`, `cursor_owner`, `cursor_lock`, `reading`, `consumers`: how far a stream's consumers are; `retire`: what
  nobody needs is deleted
- `run_state`: the state of a run and its course; `tracing` with `tracing_*`: what was trained when; `auditing` with
  `auditing_*`: was everything trained once
- `census`, `disk_use`, `survey`, `growth`, `outlook`: how a stream is, for `lazyshard status`
- `verification` with `verification_*`: is all as it was published; `inspection` with `inspection_balance`, `lengths`,
  `row_costs`, `row_keys`: what is in it
- `report_facts` with `report_*`: all that a report tells of a stream
- `rechunking` with `rechunking_rows`, `rechunking_target`: other chunks; `opening`: a directory as it is now
- `token_lengths`: lengths in tokens, sealed or measured; `token_weights`: weights of a blend by them; `tracing_blends`:
  the steps of one of its streams
- `adoption`, with `adoption_names`, `adoption_rows`, `adoption_publishing`: a stream out of other programs' chunk files
"""

from lazyshard.storage.consumers import Consumer, forget_consumer, list_consumers
from lazyshard.storage.cursor import read_cursor, write_cursor
from lazyshard.storage.cursor_owner import CursorOwner
from lazyshard.storage.published import Published
from lazyshard.storage.reader import StreamReader
from lazyshard.storage.reading import read_reading, write_reading
from lazyshard.storage.retire import list_kept, read_retired
from lazyshard.storage.writer import ChunkWriter

__all__ = [
    "ChunkWriter",
    "Consumer",
    "CursorOwner",
    "Published",
    "StreamReader",
    "forget_consumer",
    "list_consumers",
    "list_kept",
    "read_cursor",
    "read_reading",
    "read_retired",
    "write_cursor",
    "write_reading",
]
