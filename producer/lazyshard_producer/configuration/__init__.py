"""What a run is to do: from flags and a file to one checked value.

- `settings`: that value; `problems`: what may be; `reload`: what may change on the way
- `options`, with `option_kinds`, `quantities`: the table of options; `flags`, `arguments`, `source_paths`: the command
  line
- `config`: the TOML file; `assembly`: both put together; `init`: an example
"""
