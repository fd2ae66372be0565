"""Which plan trains fastest: what a plan costs, and the search for the best."""
