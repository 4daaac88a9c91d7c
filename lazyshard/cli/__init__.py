"""The command `lazyshard`.

- `main`: its entry point and the table of exit codes; imports neither typer nor rich, which may be missing
- `command`: the subcommands together, and what becomes of errors; `exits`: error -> exit code
- `doctor`, `forget`, `inspect`, `status`, `verify`: the subcommands of these names
- `status_view`, `status_words`, `status_json`: what a look says; `units`: amounts for people
- `inspect_view`, `inspect_json`, `shortening`: what rows and facts look like
- `watch`: the page of a stream, live or as a file; `watch_page` with `watch_words`, `watch_pictures`: what is on it;
  `watch_looks`: looks that viewers share; `watch_server`, `watch_metrics`: what is served
- `progress`, `plain_flags`, `wording`: what is shown and said
"""
