"""Files -> documents -> tokens -> memory-mapped cache -> windows -> batches; there is a module for each step."""
