"""Files -> documents -> tokens -> memory-mapped cache -> windows -> batches; each step is one file here."""
