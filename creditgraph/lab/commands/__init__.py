"""The lab's subcommands of `creditgraph`, one per file, imported only when called."""
