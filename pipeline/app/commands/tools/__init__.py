"""Commands around runs: exporting weights, planning a layout, comparing methods and their credit."""
