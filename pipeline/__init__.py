"""The declared graph: payloads, wires, checks and the executor. Never imports `components`."""
