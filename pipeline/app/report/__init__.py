"""`creditgraph report` and `creditgraph credit`: self-contained HTML pages of recorded runs."""
