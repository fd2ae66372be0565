"""Files -> documents -> tokens -> shards of a memory-mapped cache -> windows -> batches; a module for each step."""
