"""Commands of the adapters, named in the entry points `creditgraph.commands`."""
