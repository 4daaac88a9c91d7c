"""The command `lazyshard-producer`: takes rows from sources, makes rows of them, and publishes them as a stream.

- `cli`: `main`, the exit codes; `command`, `flags`, `arguments`: the command line; `tasks`, `check`, `init`,
  `quarantined`, `help_texts`: the commands; `options`, `option_kinds`, `quantities`: the table of options; `config`,
  `assembly`, `source_paths`: file and flags to `settings`; `problems`: what may be; `reload`, `stop`: signals
- `run`: one run from start to end; `loop`: its rows; `pace`: rate limit; `ended`: streams that are done
- `source`: what a source of rows is; `sources`: which kind a path is; `source_file`, `regular_file`: opening, knowing
  again
  - `jsonl`, `lines`: JSON lines; `compressed`, `decompression`, `read_ahead`, `digested_text`: .gz and .zst;
    `standard_input`: and pipes; `follow` with `follow_*`: directories into which others write
  - `parquet`, `arrow`, `huggingface`, `tables`, `table_files`, `arrow_*`: tables; `generator`, `function_rows`: Python
- `mixing`, `turns`, `slot`: the order of sources; `recipe`, `making`, `workers`: rows made of rows; `feed`, `book`:
  rows on their way, with their positions; `position`: where a run stands, as kept in the seals; `refusals`: bad rows;
  `pipeline`: all that put together; `preview`: without publishing
- `limits`: what may be published and deleted; `holdback`, `hold`, `hold_reasons`, `disk`: held back, why, in words, and
  what is on disk
- `metrics`, `progress`, `waits`, `recent`, `watching`, `wording`: what is seen and said; `allocator`: memory
- `ray` with `ray_blocks`, `ray_pieces`, `ray_committer`: a sink for Ray Data
- `errors`, `exits`: what goes wrong, and the exit code of each

Importing this package imports nothing else: `main` answers Ctrl-C before the first slow import.
"""
