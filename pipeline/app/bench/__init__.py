"""Benchmarks of methods: how good their credit is (`tools/creditbench`) and how fast they learn (`tools/compare`)."""
