"""Model families as pure functions of a parameter tree, without a mesh: `jhpt.models.hooks` inject parallelism."""
