"""The command `lazyshard`.

- `main`: its entry point and the table of exit codes; imports neither typer nor rich, which may be missing
- `command`: the subcommands together, and what becomes of errors; `exits`: error -> exit code
- `doctor`, `forget`, `inspect`, `status`, `verify`: the subcommands of these names
- `status_view`, `status_words`, `status_json`: what a look says; `units`: amounts for people
- `inspect_view`, `inspect_json`, `shortening`: what rows and facts look like
- `report`: a page with pictures; `report_findings` with `report_advice`, `report_advice_run`: what it says and
  proposes; `report_page`, `report_sections`, `report_sections_run`, `report_json`: what it looks like;
  `report_drawing`, `report_drawing_time`, `report_svg`: its pictures
- `progress`, `plain_flags`, `wording`: what is shown and said
"""
