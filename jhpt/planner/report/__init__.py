"""Why this plan: causes, alternatives and a timeline, as text, rows and JSON."""
