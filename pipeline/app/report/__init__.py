"""`creditgraph report` and `creditgraph credit`: one self-contained HTML page of what was recorded."""
