"""How a model lies on a mesh of devices; imported as `jhpt.sharding`."""
