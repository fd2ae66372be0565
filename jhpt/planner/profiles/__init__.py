"""Layer costs of a model: from datasheets, from measurements on this machine, or from files of other tools."""
