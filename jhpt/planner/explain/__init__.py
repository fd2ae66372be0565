"""Why this plan: an answer as words, rows and JSON.  Pure functions; `report` prints what they return."""
