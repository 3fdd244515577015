"""Benchmarks of methods: how good their credit is (`creditgraph creditbench`), how fast they learn (`… compare`)."""
