"""What a run is to do: from flags and a file to one checked value.

- `settings`, with `row_settings`: that value, and all that is known of its options; `values`: how these are written
- `quantities`: amounts as people write them
- `command_line`; `config`, the TOML file; `source_paths`: what the user says
- `assembly`: makes settings of it, by pydantic; `problems`: what does not go together; `reload`: what may change later
"""
