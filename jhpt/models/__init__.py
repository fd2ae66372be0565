"""Model families as pure functions of a parameter tree.  No mesh: parallelism is injected (`jhpt.models.hooks`)."""
