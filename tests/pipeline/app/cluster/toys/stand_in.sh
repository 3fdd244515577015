#!/bin/bash
# Stands in for a step's Python (cluster.python): ranks wait until both engine steps run, and engines until they are stopped.
place="$CREDITGRAPH_TEST_PLACE"
[[ "$1 $2 $3" == "-P -m creditgraph" ]] || exit 4
meet() { for _ in {1..300}; do [[ -e "$place/$1" && -e "$place/${2:-$1}" ]] && return; sleep 0.1; done; return 3; }
case "$4" in
    train) env >"$place/rank-$SLURM_PROCID"; meet engine-0 engine-1; code=$?; touch "$place/over"; exit "$code" ;;
    serve) touch "$place/engine-${*: -3:1}"; meet over; sleep 20 ;;
esac
